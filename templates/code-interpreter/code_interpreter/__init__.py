"""The code interpreter's service: runs code in contexts that keep their state, and streams what it gives as lines of JSON.

server      HTTP on port 49999
contexts    which contexts there are; one execution at a time in each
kernels     the two kinds of processes that run code, behind one small interface:
  jupyter   any Jupyter kernel: Python (python_kernel), bash, and others that are installed
  node      JavaScript and TypeScript (kernel.js)
events      what stands on the lines
environment variables of the sandbox and of one execution

No timer here measures anything but silence, by the monotonic clock: a sandbox that was paused for a week goes on where it was.
"""
