"""The SDK's git calls, against a daemon in the same sandbox."""

import pytest
from conftest import wait_for


@pytest.mark.compat("python", "git.init", "git.add", "git.commit", "git.push", "git.clone", "git.pull", "git.configure_user")
def test_push_clone_and_pull(shared):
    git = shared.git
    shared.files.make_dir("served")
    git.init("served/remote.git", bare=True, initial_branch="main")
    daemon = "git daemon --export-all --enable=receive-pack --base-path=/home/user/served --reuseaddr --listen=127.0.0.1"
    running = shared.commands.run(daemon, background=True, timeout=0)
    try:
        git.configure_user("A", "a@example.com")
        url = "git://127.0.0.1/remote.git"
        git.init("one", initial_branch="main")
        shared.files.write("one/file", "first\n")
        git.add("one")
        git.commit("one", "The first")
        git.remote_add("one", "origin", url)
        wait_for("the daemon", lambda: shared.commands.run("ss -Hltn sport = :9418").stdout)
        git.push("one", remote="origin", branch="main")
        git.clone(url, "two")
        assert shared.files.read("two/file") == "first\n"
        shared.files.write("one/file", "second\n")
        git.add("one")
        git.commit("one", "The second")
        git.push("one")
        git.pull("two")
        assert shared.files.read("two/file") == "second\n"
    finally:
        running.kill()
