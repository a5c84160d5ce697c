"""A host that can have hardly any more processes: the server's control group is at its limit.

Promised: a launch is refused at once with a 429 that says when to ask again, and leaves nothing behind; what runs goes on, and can be
paused; once there is room again everything works.
"""

import contextlib
import os
from pathlib import Path

import pytest

from conftest import LONG

# cgroups(7): version 1 has a mount of its own for each controller.
MOUNTS = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]


@contextlib.contextmanager
def few_processes(pid, more):
    """A process in a control group that takes so many more."""
    mount = next((mount for mount in MOUNTS if (mount / "cgroup.procs").exists()), None)
    if mount is None:
        pytest.skip("no control groups are mounted here")
    group = mount / f"aenv-test-{os.getpid()}"
    group.mkdir()
    try:
        if not (group / "pids.max").exists():
            pytest.skip("control groups have no limit of processes here")
        (group / "cgroup.procs").write_text(str(pid))
        current = int((group / "pids.current").read_text())
        (group / "pids.max").write_text(str(current + more))
        yield
    finally:
        (mount / "cgroup.procs").write_text(str(pid))
        for other in (group / "cgroup.procs").read_text().split():
            (mount / "cgroup.procs").write_text(other)
        group.rmdir()


def test_no_free_processes(server, shared):
    create = lambda: server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG})
    listed = lambda: sorted(entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1])
    status, paused = create()
    assert status == 201, paused
    path = f"/sandboxes/{paused['sandboxID']}"
    before = listed()
    with few_processes(server.pid("server"), 40):
        status, refused = create()
        assert (status, refused["error_code"]) == (429, "sandbox_capacity_unavailable"), refused
        assert "processes" in refused["message"]
        assert shared.commands.run("echo on").stdout == "on\n"
        assert server.api("POST", f"{path}/pause", {})[0] == 204
        status, refused = server.api("POST", f"/v2{path}/connect", {"timeout": LONG})
        assert (status, refused["error_code"]) == (429, "sandbox_capacity_unavailable"), refused
        assert listed() == before
    status, _ = server.api("POST", f"/v2{path}/connect", {"timeout": LONG})
    assert status == 201
    assert server.api("DELETE", path)[0] == 204
