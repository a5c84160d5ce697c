"""kill -9 of the server in the middle of a template build.

Promised: after a restart the build goes on from its cached steps, says so in its log, and ends as if nothing had happened; nothing
of the first attempt stays.
"""

from builds import Build, hidden, vmms_of


def test_a_build_outlives_its_server(server):
    # No other test has a step like this.
    made = "head -c 16 /dev/urandom | od -An -tx1; : outlives"
    build = Build(server, "chaos-build", [made, "echo begun; sleep 15; echo done"])
    try:
        build.says("begun")
        used = hidden(server)
        assert vmms_of(server, used)
        server.kill()
        server.start()
        assert not vmms_of(server, used)
        assert build.status()["status"] == "building"
        build.ends("ready")
        log = build.log("?limit=1000")
        assert "The server was restarted; the build starts again" in log
        # The first step ran once, and the second one again.
        assert len([line for line in log if len(line.split()) == 16]) == 1, log
        assert (log.count("begun"), log.count("done")) == (2, 1), log
        assert not hidden(server)
    finally:
        build.delete()
