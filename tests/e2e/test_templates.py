"""Template builds with the published SDK."""

import time

import pytest
from e2b import BuildException, Sandbox, Template

SIZE = {"cpu_count": 1, "memory_mb": 512}


@pytest.fixture
def context(tmp_path):
    """A folder to copy from: a file, a link to it, and a link to nothing."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "file").write_text("content\n")
    (folder / "near").symlink_to("file")
    (folder / "nowhere").symlink_to("missing")
    return tmp_path


@pytest.mark.compat("python", "Template.build", "Template.from_template", "Template.copy", "Template.run_cmd", "Template.set_envs", "Template.set_start_cmd")
def test_a_build_and_its_next_one(server, context):
    def recipe(last):
        return (
            Template(file_context_path=context)
            .from_template("base")
            .set_envs({"COLOUR": "blue"})
            .copy("tree", "/home/user/tree")
            .copy("tree/near", "/home/user/far", resolve_symlinks=True)
            .run_cmd("id -un > /tmp/once", user="root")
            .run_cmd("pwd > /tmp/where; id -un > /tmp/who; echo $COLOUR > /tmp/colour; head -c 16 /dev/urandom | od -An -tx1 > /tmp/made")
            .run_cmd(f"echo {last} > /tmp/last")
            .set_start_cmd("echo started > /tmp/started", "test -s /tmp/started")
        )

    def build(last):
        lines = []
        info = Template.build(recipe(last), "e2e-built:tried", on_build_logs=lambda entry: lines.append(entry.message), **SIZE)
        assert info.template_id and any("Build finished" in line for line in lines), lines
        made = Sandbox.create("e2e-built:tried", timeout=600)
        names = "where who colour once started last made"
        answer = made.commands.run(f"cd /tmp; cat {names}; readlink ~/tree/near ~/tree/nowhere; cat ~/far; echo $COLOUR").stdout
        assert made.kill()
        lines = answer.splitlines()
        assert lines[:6] == ["/home/user", "user", "blue", "root", "started", last], answer
        assert lines[7:] == ["file", "missing", "content", "blue"], answer
        return lines[6]

    try:
        first = build("one")
        assert Template.exists("e2e-built:tried")
        # Only the last step has changed, so the others are taken from the cache.
        assert build("two") == first
    finally:
        assert server.api("DELETE", "/templates/e2e-built")[0] == 204


@pytest.mark.compat("python", "Template.build_in_background", "Template.get_build_status")
def test_a_build_in_the_background(server):
    info = Template.build_in_background(Template().from_template("base").run_cmd("sleep 2; echo in the log"), "e2e-background", **SIZE)
    began, offset, seen = time.monotonic(), 0, []
    status = Template.get_build_status(info, logs_offset=0)
    assert status.status.value == "building"
    while status.status.value == "building" and time.monotonic() < began + 600:
        status = Template.get_build_status(info, logs_offset=offset)
        offset += len(status.log_entries)
        seen += [entry.message for entry in status.log_entries]
        time.sleep(0.2)
    assert status.status.value == "ready", seen
    assert any("in the log" in line for line in seen)
    assert Template.get_build_status(info, logs_offset=100_000).log_entries == []
    assert server.api("DELETE", "/templates/e2e-background")[0] == 204


def test_a_build_that_fails_says_where(server):
    unknown = Template().from_template("base").run_cmd("whoami", user="root123")
    text = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
    with pytest.raises(BuildException, match=text.replace("(", r"\(")):
        Template.build(unknown, "e2e-failing", **SIZE)
    assert not Template.exists("e2e-failing") or server.api("POST", "/v2/sandboxes", {"templateID": "e2e-failing"})[0] == 400
    server.api("DELETE", "/templates/e2e-failing")
