"""Template builds by their API: side by side, their logs, their ends; and images of registries that want to know who asks."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from e2b import BuildException, Template

from builds import Build, hidden, vmms_of
from conftest import IMAGE, wait_for
from registry import registry

SIZE = {"cpu_count": 1, "memory_mb": 512}
#: What moto gives out as ECR's password. bcrypt of it, of the service account below, and of "secret".
AWS_PASSWORD = "123456789012-auth-token"
SERVICE_ACCOUNT = {"type": "service_account", "project_id": "p"}
HTPASSWD = [
    "AWS:$2b$05$abcdefghijklmnopqrstuu/4ofrUS75HrKu6f.iuRo0I/XlrmpqlC",
    "_json_key:$2b$05$abcdefghijklmnopqrstuuknQWCDChw5HJwL3swx1IsqhANaV4r1S",
    "tester:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a",
]


def test_builds_side_by_side_and_their_ends(server):
    before = set((server.home / "builds").iterdir())
    slow = [Build(server, f"e2e-slow-{number}", ["echo begun; sleep 3600"]) for number in range(2)]
    for build in slow:
        build.says("begun")
    used = hidden(server)
    assert len(used) == len(vmms_of(server, used)) == 2
    # Both run. A third one waits, and says so.
    third = Build(server, "e2e-third", ["echo fine; echo careful >&2", "echo last; exit 3"])
    third.says("Waiting for a turn: 2 builds run at once")
    assert third.status()["status"] == "building"
    # Deleting the template ends its build, which lets the third one go on.
    slow[0].delete()
    assert server.api("GET", f"{slow[0].path}/status")[0] == 404
    third.ends("error")
    reason = third.status()["reason"]
    assert (reason["step"], reason["message"]) == ("2", "failed to run command 'echo last; exit 3': exit status 3")

    everything = third.log("?limit=1000")
    assert [line for line in everything if line in ("fine", "careful", "last")] == ["fine", "careful", "last"]
    serious = third.log("?level=warn")
    assert serious == ["careful", reason["message"]] == third.log("?level=warn&direction=backward")[::-1]
    assert third.log("?level=error&source=temporary") == [reason["message"]]
    # Pages of the status go on by as many entries as came, also of one level.
    pages = [third.status(f"?logsOffset={offset}&limit=1&level=warn")["logs"] for offset in range(3)]
    assert pages == [["careful"], [reason["message"]], []]
    entries = third.status("?limit=100")["logEntries"]
    assert [entry["message"] for entry in entries] == everything
    assert {entry["step"] for entry in entries if entry["message"] in ("fine", "careful")} == {"1"}
    for query in ["?level=loud", "?direction=sideways", "?source=elsewhere", "?limit=0"]:
        assert server.api("GET", f"{third.path}/logs{query}")[0] == 400, query

    slow[1].delete()
    third.delete()
    # Of a template that was deleted in a build nothing stays: no VM, no log, no request.
    wait_for("the end of the builds", lambda: set((server.home / "builds").iterdir()) <= before, 60)
    assert not hidden(server) and not vmms_of(server, used)


def test_nothing_is_built_twice_unless_it_is_asked_for(server):
    # No other test has a step like this.
    made = "head -c 16 /dev/urandom | od -An -tx1; : twice"

    def build(**more):
        one = Build(server, "e2e-again", [made], **more)
        one.ends("ready")
        return one.log("?limit=1000")

    try:
        first, second, forced = build(), build(), build(force=True)
        is_cached = [any("CACHED" in line for line in log) for log in (first, second, forced)]
        assert is_cached == [False, True, False]
        hexes = [[line for line in log if len(line.split()) == 16] for log in (first, second, forced)]
        assert [len(lines) for lines in hexes] == [1, 0, 1] and hexes[0] != hexes[2]
    finally:
        server.api("DELETE", "/templates/e2e-again")


@contextlib.contextmanager
def amazon(server):
    """Amazon's registry API, which checks signatures; gives a key that it knows."""
    host, port = server.ecr.removeprefix("http://").split(":")
    words = [Path(sys.executable).parent / "moto_server", "-H", host, "-p", port]
    # The three calls that make the key are checked for nothing, and all others are.
    process = subprocess.Popen(words, env={"INITIAL_NO_AUTH_ACTION_COUNT": "3"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        iam = boto3.client("iam", "eu-central-1", endpoint_url=server.ecr, aws_access_key_id="x", aws_secret_access_key="x")

        def made():
            with contextlib.suppress(Exception):
                return iam.create_user(UserName="builder")

        wait_for("moto", made, 60)
        allowed = {"Effect": "Allow", "Action": "ecr:GetAuthorizationToken", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="builder", PolicyName="pull", PolicyDocument=policy)
        yield iam.create_access_key(UserName="builder")["AccessKey"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.compat("python", "Template.from_image", "Template.from_aws_registry", "Template.from_gcp_registry")
def test_images_of_registries_that_want_to_know_who_asks(server, tmp_path):
    def build(template):
        lines = []
        Template.build(template, "e2e-private", on_build_logs=lambda entry: lines.append(entry.message), **SIZE)
        return lines

    def aws(key_id, secret):
        return Template().from_aws_registry(name, key_id, secret, "eu-central-1")

    with registry(tmp_path, HTPASSWD) as port:
        name = f"127.0.0.1:{port}/base:1"
        # The very image that `base` is made of: what has been made of it serves these builds too.
        copy = ["skopeo", "--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
        subprocess.run([*copy, "--dest-creds", "tester:secret", f"oci:{IMAGE}", f"docker://{name}"], check=True)
        try:
            for refused in [Template().from_image(name), Template().from_image(name, "tester", "wrong")]:
                with pytest.raises(BuildException, match="the registry refuses access"):
                    build(refused)
            build(Template().from_image(name, "tester", "secret"))
            build(Template().from_gcp_registry(name, SERVICE_ACCOUNT))
            with pytest.raises(BuildException, match="cannot be reached|could not be fetched"):
                build(aws("AKIAEXAMPLE", "nothing-listens"))
            with amazon(server) as key:
                lines = build(aws(key["AccessKeyId"], key["SecretAccessKey"]))
                assert any(name in line for line in lines), lines
                with pytest.raises(BuildException, match="AWS refuses the access key"):
                    build(aws(key["AccessKeyId"], "wrong-secret"))
                with pytest.raises(BuildException, match="AWS refuses the access key"):
                    build(aws("AKIANOBODYHASTHIS0", key["SecretAccessKey"]))
            with pytest.raises(BuildException, match="is no AWS region"):
                build(Template().from_aws_registry(name, "AKIAEXAMPLE", "x", "evil.example/"))
            # What is secret is in no log, and in no file once the builds have ended.
            written = [server.log, *(server.home / "builds").glob("*/*")]
            for secret in [key["SecretAccessKey"], AWS_PASSWORD, "service_account", "nothing-listens", "wrong-secret"]:
                assert not [path for path in written if secret in path.read_text(errors="replace")], secret
        finally:
            server.api("DELETE", "/templates/e2e-private")
