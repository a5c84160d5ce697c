"""A server, or a blockd, that may open hardly any more files.

Promised: a launch is refused at once with a 429 that says when to ask again, and leaves nothing behind; what runs goes on, and can be
paused; once there are files again everything works.
"""

import contextlib
import os
import resource

import pytest

from conftest import LONG


@contextlib.contextmanager
def few_files(pid, more):
    """The process may open so many more files."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + more, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("process", ["server", "blockd"])
def test_no_free_descriptors(server, shared, process):
    folders = lambda: sorted(entry.name for entry in (server.home / "sandboxes").iterdir())
    listed = lambda: sorted(entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1])
    create = lambda: server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG})
    status, paused = create()
    assert status == 201, paused
    path = f"/sandboxes/{paused['sandboxID']}"
    before = listed()
    with few_files(server.pid(process), 40):
        status, refused = create()
        assert (status, refused["error_code"]) == (429, "sandbox_capacity_unavailable"), refused
        assert "files" in refused["message"]
        assert shared.commands.run("echo on").stdout == "on\n"
        assert server.api("POST", f"{path}/pause", {})[0] == 204
        status, refused = server.api("POST", f"/v2{path}/connect", {"timeout": LONG})
        assert (status, refused["error_code"]) == (429, "sandbox_capacity_unavailable"), refused
        assert listed() == before
    status, _ = server.api("POST", f"/v2{path}/connect", {"timeout": LONG})
    assert status == 201
    assert server.api("DELETE", path)[0] == 204
    assert paused["sandboxID"] not in folders()
