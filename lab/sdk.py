"""The main job by the published Python SDK, on the server that AENV's variables name. Run by lab/server-inside.sh."""

import time

from e2b import Sandbox

#: Nothing expires while a machine is emulated.
LONG = 6 * 3600
began = time.monotonic()


def done(what):
    global began
    print(f"sdk: {what:<28} {1000 * (time.monotonic() - began):7.0f} ms (emulated)", flush=True)
    began = time.monotonic()


sandbox = Sandbox.create("base", timeout=LONG)
done("create")
assert sandbox.commands.run("echo $((6 * 7))", timeout=300, request_timeout=300).stdout == "42\n"
sandbox.files.write("/home/user/a.txt", "hi")
done("run, write")
sandbox.pause()
done("pause")
sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=LONG)
assert sandbox.files.read("/home/user/a.txt") == "hi"
done("resume, read")
children = sandbox.fork(count=4, timeout=LONG)
for child in children:
    assert child.files.read("/home/user/a.txt") == "hi"
    child.files.write("/home/user/a.txt", child.sandbox_id)
assert sandbox.files.read("/home/user/a.txt") == "hi"
done("fork 4, read, write")
snapshot = sandbox.create_snapshot(name="prepared")
copy = Sandbox.create(snapshot.snapshot_id, timeout=LONG)
assert copy.files.read("/home/user/a.txt") == "hi"
done("snapshot, create from it")
for one in [sandbox, copy, *children]:
    assert one.kill()
assert Sandbox.delete_snapshot(snapshot.snapshot_id)
done("end all")
