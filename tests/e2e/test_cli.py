"""The command: the same job without an SDK."""

import json
import subprocess

from conftest import BIN, IMAGE


def test_the_job(server, tmp_path):
    made = json.loads(server.cli("start", "base", "--timeout", 600, "--metadata", "by=cli", "-d").stdout)
    id = made["sandboxID"]
    children = []
    try:
        assert server.cli("exec", id, "--", "echo", "a b", "$HOME").stdout == "a b $HOME\n"
        assert server.cli("exec", id, "--", "sh", "-c", "exit 9", check=False).returncode == 9
        assert server.cli("exec", id, "--", "sh", "-c", "kill -9 $$", check=False).returncode == 137
        assert server.cli("exec", id, "-i", "--", "tr", "a-z", "A-Z", input="quiet").stdout == "QUIET"
        assert server.cli("exec", id, "--user", "root", "--", "id", "-un").stdout == "root\n"

        folder = tmp_path / "folder"
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_bytes(bytes(range(256)) * 1000)
        server.cli("upload", id, folder, "/home/user/folder")
        server.cli("download", id, "/home/user/folder", tmp_path / "back")
        assert (tmp_path / "back/deep/file").read_bytes() == (folder / "deep/file").read_bytes()

        server.cli("pause", id)
        server.cli("pause", id)
        assert json.loads(server.cli("info", id).stdout)["state"] == "paused"
        server.cli("resume", id)
        children = [c["sandbox"]["sandboxID"] for c in json.loads(server.cli("fork", id, "--count", 2).stdout)]
        assert len(children) == 2
        snapshot = json.loads(server.cli("snapshot", "create", id, "--name", "from-cli").stdout)["snapshotID"]
        server.cli("exec", id, "--", "sh", "-c", "rm -r ~/folder")
        server.cli("rollback", id, snapshot)
        assert server.cli("exec", id, "--", "ls", "/home/user/folder").stdout == "deep\n"
        assert snapshot in server.cli("snapshot", "list").stdout
        server.cli("snapshot", "delete", snapshot)
        ids = [entry["sandboxID"] for entry in json.loads(server.cli("list", "--metadata", "by=cli").stdout)]
        assert id in ids
    finally:
        server.cli("delete", id, *children)
    assert server.cli("info", id, check=False).returncode == 4


def test_errors_have_codes_and_words(server):
    unknown = server.cli("start", "no-such-template", "-d", check=False)
    assert unknown.returncode == 4 and "no-such-template" in unknown.stderr
    usage = server.cli("exec", check=False)
    assert usage.returncode == 2
    nobody = subprocess.run(
        [BIN / "aenv", "list"], capture_output=True, text=True, env={**server.env, "AENV_URL": "http://127.0.0.1:9"}
    )
    assert nobody.returncode == 3 and "cannot be reached" in nobody.stderr
    assert "_aenv" in server.cli("completion", "bash").stdout


def test_a_dockerfile_becomes_a_template(server, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print('from the image')\n")
    (tmp_path / "Dockerfile").write_text(
        f"""FROM template:base AS build
RUN mkdir -p /tmp/out/deep && echo compiled > /tmp/out/deep/program
FROM template:no-such-template AS unused
RUN false
FROM oci:{IMAGE}
ARG WHO=nobody
ENV GREETING=hello
RUN id -un > /root-made
WORKDIR /srv/app
COPY app/ .
COPY --from=build /tmp/out /opt/built
COPY <<EOF text
greetings, $WHO
EOF
RUN echo $GREETING > greeting
"""
    )
    server.cli("build", tmp_path, "--name", "built", "--cpu", "1", "--memory", "512", "--build-arg", "WHO=reader")
    names = [name for one in json.loads(server.cli("template", "list").stdout) for name in one["names"]]
    assert "default/built" in names and not any("stage" in name for name in names)
    id = json.loads(server.cli("start", "built", "-d").stdout)["sandboxID"]
    try:
        script = "pwd; id -un; cat /root-made greeting text /opt/built/deep/program; python3 main.py; echo $GREETING"
        ran = server.cli("exec", id, "--", "sh", "-c", script).stdout
        assert ran.split("\n")[:-1] == [
            "/srv/app", "user", "root", "hello", "greetings, reader", "compiled", "from the image", "hello",
        ]
    finally:
        server.cli("delete", id)
        server.cli("template", "delete", "built")
