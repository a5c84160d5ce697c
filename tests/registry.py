"""A real container registry on the loopback interface."""

import contextlib
import re
import subprocess
import threading


@contextlib.contextmanager
def registry(folder, htpasswd=None):
    """Gives its port. With `htpasswd`, the lines of such a file, it wants a user and a password."""
    config = folder / "config.yml"
    text = (
        f"version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\nhttp: {{addr: '127.0.0.1:0'}}\n"
    )
    if htpasswd:
        (folder / "htpasswd").write_text("".join(f"{line}\n" for line in htpasswd))
        text += f"auth: {{htpasswd: {{realm: test, path: {folder / 'htpasswd'}}}}}\n"
    config.write_text(text)
    process = subprocess.Popen(["docker-registry", "serve", config], stderr=subprocess.PIPE, text=True)
    try:
        port = next(filter(None, (re.search(r"listening on 127.0.0.1:(\d+)", line) for line in process.stderr)))[1]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield int(port)
    finally:
        process.kill()
        process.wait()
