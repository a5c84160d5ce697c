"""A guest whose clock jumps.

Promised: deadlines are the server's, whatever a guest thinks that the time is; its API goes on; and after a pause the guest's clock
is right again.
"""

import time

import pytest
from conftest import wait_for
from e2b import Sandbox, SandboxState


@pytest.mark.parametrize("date", ["1999-12-31 23:59:58", "2037-06-01 00:00:00"])
def test_a_clock_that_jumps(server, date):
    sandbox = Sandbox.create("base", timeout=600, lifecycle={"on_timeout": "pause"})
    clock = lambda: int(sandbox.commands.run("date +%s", timeout=60).stdout)
    try:
        end = sandbox.get_info().end_at
        sandbox.commands.run(f"date -s '{date}'", user="root", timeout=60)
        assert abs(clock() - time.time()) > 10**7, "it has not jumped"
        assert sandbox.get_info().end_at == end
        assert sandbox.is_running()
        sandbox.files.write("name", "kept")

        began = time.monotonic()
        sandbox.set_timeout(3)
        wait_for("the deadline", lambda: sandbox.get_info().state == SandboxState.PAUSED, 60)
        assert time.monotonic() - began > 2.5, "it came before its time"

        sandbox.connect(timeout=600)
        before = time.time()
        assert before - 2 < clock() < time.time() + 2
        assert sandbox.files.read("name") == "kept"
    finally:
        sandbox.kill()
