"""A second team sees and can do nothing of the first's: every call of the API's own description that takes an id, and the data plane."""

import json
import subprocess
import urllib.error
import urllib.request

import pytest
from conftest import LONG, wait_for


class Key:
    """An API key, and calls with it."""

    def __init__(self, server, key):
        self.server, self.key = server, key

    def call(self, method, path, body=None, headers=None):
        """(status, body, headers)"""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data=data, method=method)
        for name, value in {"X-API-Key": self.key, "Content-Type": "application/json", **(headers or {})}.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, text, got = response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            status, text, got = error.code, error.read(), error.headers
        try:
            return status, json.loads(text) if text else None, got
        except ValueError:
            return status, text, got


def new_key(server, name, team, **limits):
    status, made = server.api("POST", "/api-keys", {"name": name, "team": team, "limits": limits})
    assert status == 201, made
    return Key(server, made["key"]), made["id"]


@pytest.fixture(scope="module")
def first(server):
    """What the first team has: a running sandbox, a snapshot with a name, a template with a build, a key, a volume, a secret."""
    spawned = lambda: next(t for t in server.api("GET", "/v2/templates")[1] if "base" in t["aliases"])["spawnCount"]
    before = spawned()
    status, sandbox = server.api(
        "POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG, "network": {"allowPublicTraffic": False}}
    )
    assert status == 201, sandbox
    # It is counted in the background; tests compare the template with what it was.
    wait_for("the create's count", lambda: spawned() > before)
    status, snapshot = server.api("POST", f"/sandboxes/{sandbox['sandboxID']}/snapshots", {"name": "team-secret"})
    assert status == 201, snapshot
    template = next(t for t in server.api("GET", "/v2/templates")[1] if "base" in t["aliases"])
    _, key = new_key(server, "of the first team", "default")
    status, volume = server.api("POST", "/volumes", {"name": "team-volume"})
    assert status == 201, volume
    status, secret = server.api("POST", "/secrets", {"name": "team-key", "value": "x"})
    assert status == 201, secret
    yield {
        "sandbox": sandbox, "snapshot": snapshot["snapshotID"], "template": template, "key": key,
        "volume": volume["volumeID"], "secret": secret["secretID"],
    }
    server.api("DELETE", f"/secrets/{secret['secretID']}")
    server.api("DELETE", f"/volumes/{volume['volumeID']}")
    server.api("DELETE", f"/api-keys/{key}")
    server.api("DELETE", f"/templates/{snapshot['snapshotID'].replace('/', '%2F').replace(':', '%3A')}")
    server.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


@pytest.fixture(scope="module")
def second(server):
    key, id = new_key(server, "second", "second")
    yield key
    server.api("DELETE", f"/api-keys/{id}")


# Bodies that get a call to the point where it looks for what its path names.
BODIES = {
    ("post", "/sandboxes/{id}/timeout"): {"timeout": 60},
    ("post", "/sandboxes/{id}/connect"): {"timeout": 60},
    ("post", "/sandboxes/{id}/rollback"): {"snapshotID": "team-secret"},
    ("post", "/v2/templates/{id}/builds/{build}"): {"fromTemplate": "base"},
    ("patch", "/api-keys/{id}"): {"name": "taken over"},
    ("post", "/secrets/{secret}"): {"value": "taken over"},
    ("patch", "/templates/{id}"): {"public": True},
    ("patch", "/v2/templates/{id}"): {"public": True},
}
QUERIES = {("get", "/templates/{id}/tags/exists"): "?tag=default"}
# What answers by name for the caller's own team, or is the same for everybody.
SHARED = {
    # The node, without what other teams do on it.
    ("get", "/nodes/{id}"),
    # Where the caller may upload a file of its own; asked for before a template is there.
    ("get", "/templates/{id}/files/{hash}"),
}


def quoted(text):
    return text.replace("/", "%2F").replace(":", "%3A")


def ids(path, first):
    """Everything of the first team that a path's parameters could name."""
    sandbox, snapshot = first["sandbox"]["sandboxID"], quoted(first["snapshot"])
    template = first["template"]
    values = {"{build}": template["buildID"], "{hash}": "a" * 64, "{tag}": "default"}
    if path.startswith(("/sandboxes", "/v2/sandboxes")):
        kinds = [sandbox]
    elif path.startswith("/api-keys"):
        kinds = [first["key"], "first"]
    elif path.startswith("/snapshots"):
        kinds = [snapshot, "team-secret"]
    elif path.startswith("/volumes"):
        kinds = [first["volume"], "team-volume"]
    elif path.startswith("/secrets"):
        kinds = [first["secret"], "team-key"]
    else:
        kinds = [template["templateID"], "base", "default%2Fbase", snapshot]
    for kind in kinds:
        filled = path.replace("{id}", kind).replace("{alias}", kind).replace("{secret}", kind)
        for name, value in values.items():
            filled = filled.replace(name, value)
        assert "{" not in filled, f"{path}: the test does not know what to put there"
        yield kind, filled


def everything(server, first):
    """What the first team has, as it sees it."""
    seen = {
        "sandbox": server.api("GET", f"/sandboxes/{first['sandbox']['sandboxID']}"),
        "network": server.api("GET", f"/sandboxes/{first['sandbox']['sandboxID']}")[1]["network"],
        "snapshot": server.api("GET", f"/snapshots/{quoted(first['snapshot'])}"),
        "template": server.api("GET", f"/templates/{first['template']['templateID']}"),
        "tags": server.api("GET", "/templates/base/tags"),
        "volume": server.api("GET", f"/volumes/{first['volume']}"),
        "secret": server.api("GET", f"/secrets/{first['secret']}"),
        "keys": sorted((key["id"], key["name"]) for key in server.api("GET", "/api-keys")[1]),
    }
    return seen


def test_no_call_reaches_what_another_team_has(server, first, second):
    before = everything(server, first)
    described = json.loads(urllib.request.urlopen(f"{server.url}/openapi.json").read())["paths"]
    tried = 0
    for path, operations in described.items():
        if "{" not in path:
            continue
        for method in operations:
            if (method, path) in SHARED or method not in ("get", "post", "put", "patch", "delete"):
                continue
            # What needs no key, and what takes a volume's token and no key (tests/e2e/test_volumes.py).
            if operations[method].get("security") in ([{}], [{"VolumeToken": []}]):
                continue
            body = BODIES.get((method, path), {} if method in ("post", "put", "patch") else None)
            for kind, filled in ids(path, first):
                filled += QUERIES.get((method, path), "")
                status, answer, _ = second.call(method.upper(), filled, body)
                # A 400 would say that the request did not get as far as the look-up: give it a body above.
                assert status in (403, 404), f"{method} {filled}: {status} {answer}"
                tried += 1
                # And it is the answer that anybody gets for what was never there.
                if kind == first["sandbox"]["sandboxID"]:
                    unknown = "i" + "0" * 19
                    status_of_none, none, _ = second.call(method.upper(), filled.replace(kind, unknown), body)
                    assert status_of_none == status
                    assert none["message"].replace(unknown, "X") == answer["message"].replace(kind, "X")
    assert tried > 40, "the description is not what it was"
    assert everything(server, first) == before


def test_lists_are_ones_own(first, second):
    for path in ["/sandboxes", "/v2/sandboxes?state=running,paused", "/snapshots", "/v2/templates", "/templates"]:
        assert second.call("GET", path)[:2] == (200, []), path
    by_sandbox = f"/snapshots?sandboxID={first['sandbox']['sandboxID']}"
    assert second.call("GET", by_sandbox)[:2] == (200, [])
    metrics = second.call("GET", f"/sandboxes/metrics?sandbox_ids={first['sandbox']['sandboxID']}")[1]
    assert metrics == {"sandboxes": {}}
    assert [key["team"] for key in second.call("GET", "/api-keys")[1]] == ["second"]
    assert [team["teamID"] for team in second.call("GET", "/teams")[1]] == ["second"]
    node = second.call("GET", "/nodes")[1][0]
    assert (node["sandboxCount"], node["metrics"]["allocatedMemoryBytes"], node["createSuccesses"]) == (0, 0, 0)


def test_names_in_bodies_are_ones_own(first, second):
    names = ["base", "default/base", first["template"]["templateID"], "team-secret", first["snapshot"]]
    for name in names:
        status, answer, _ = second.call("POST", "/v2/sandboxes", {"templateID": name, "timeout": 60})
        assert status == 404, (name, answer)
    assert second.call("POST", "/templates/tags", {"target": "base:default", "tags": ["mine"]})[0] == 404
    assert second.call("DELETE", "/templates/tags", {"name": "base", "tags": ["mine"]})[0] == 404
    assert second.call("POST", "/v3/templates", {"name": "default/base"})[0] == 403
    assert second.call("POST", "/api-keys", {"name": "x", "team": "default"})[0] == 403
    for path in ["/admin/repository/gc", "/admin/repository/fsck"]:
        assert second.call("POST", path, {"dryRun": True})[0] == 403
    assert second.call("GET", "/admin/repository/usage")[0] == 403
    # The same names are free for a team of its own.
    status, made, _ = second.call("POST", "/v3/templates", {"name": "base"})
    assert status == 202 and made["templateID"] != first["template"]["templateID"]
    assert second.call("DELETE", f"/templates/{made['templateID']}")[0] == 204


def test_the_data_plane_takes_no_api_key(first, second):
    id = first["sandbox"]["sandboxID"]
    to_envd = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "49983"}
    assert second.call("GET", "/files?path=/etc/hostname&username=user", headers=to_envd)[0] == 401
    listed = second.call("POST", "/process.Process/List", {}, {**to_envd, "Connect-Protocol-Version": "1"})
    assert listed[0] == 401, listed
    assert second.call("GET", "/", headers={"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "8080"})[0] == 403
    assert second.call("GET", "/", headers={"Host": f"8080-{id}.example.com"})[0] == 403


def test_traffic_without_its_token_wakes_nobody(server):
    status, made = server.api(
        "POST", "/v2/sandboxes",
        {"templateID": "base", "timeout": LONG, "autoPause": True, "autoResume": {"enabled": True},
         "network": {"allowPublicTraffic": False}},
    )
    assert status == 201, made
    id, key = made["sandboxID"], Key(server, server.key)
    try:
        assert server.api("POST", f"/sandboxes/{id}/pause", {})[0] == 204
        to_port = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "8080"}
        for token in [{}, {"e2b-traffic-access-token": "guessed"}]:
            assert key.call("GET", "/", headers={**to_port, **token})[0] == 403
            assert server.api("GET", f"/sandboxes/{id}")[1]["state"] == "paused"
        right = {**to_port, "e2b-traffic-access-token": made["trafficAccessToken"]}
        assert key.call("GET", "/", headers=right)[0] == 502, "nothing listens there, but the sandbox runs"
        assert server.api("GET", f"/sandboxes/{id}")[1]["state"] == "running"
    finally:
        server.api("DELETE", f"/sandboxes/{id}")


def test_limits_of_a_key(server):
    made = server.cli("key", "create", "limited", "--team", "default", "--max-running", 40, "--max-snapshots", 1,
                      "--max-requests", 1000, "--max-timeout", 60)
    made = json.loads(made.stdout)
    key = Key(server, made["key"])
    try:
        assert made["limits"]["maxSnapshots"] == 1
        status, answer, _ = key.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 61})
        assert status == 400 and "60" in answer["message"]
        wider = {"name": "wider", "limits": {"maxRunningSandboxes": 41}}
        assert key.call("POST", "/api-keys", wider)[0] == 403
        there = len(server.api("GET", "/snapshots")[1])
        status, sandbox, _ = key.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60})
        assert status == 201, sandbox
        id = sandbox["sandboxID"]
        taken = [key.call("POST", f"/sandboxes/{id}/snapshots", {}) for _ in range(2)]
        refused = taken[-1]
        assert refused[0] == 429 and refused[1]["error_code"] == "snapshot_limit_reached"
        assert refused[2]["Should-Retry"] == "false"
        for status, snapshot, _ in taken:
            if status == 201:
                assert there == 0
                server.api("DELETE", f"/templates/{quoted(snapshot['snapshotID'])}")
        key.call("DELETE", f"/sandboxes/{id}")
    finally:
        server.cli("key", "revoke", made["id"])


def test_a_rate_is_kept(server):
    key, id = new_key(server, "slow", "slow", maxRequestsPerSecond=5)
    try:
        answers = [key.call("GET", "/v2/sandboxes") for _ in range(60)]
        refused = [answer for answer in answers if answer[0] == 429]
        assert refused and all(answer[0] in (200, 429) for answer in answers)
        assert refused[0][1]["error_code"] == "rate_limited" and int(refused[0][2]["Retry-After"]) >= 1
        wait_for("a request that is let through again", lambda: key.call("GET", "/v2/sandboxes")[0] == 200, 20, 0.5)
    finally:
        server.api("DELETE", f"/api-keys/{id}")


def test_the_memory_of_running_sandboxes_is_limited(server):
    few, few_id = new_key(server, "few", "default", maxMemoryMiB=1)
    try:
        status, answer, headers = few.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60})
        assert (status, answer["error_code"]) == (429, "memory_limit_reached")
        assert int(headers["Retry-After"]) >= 1
    finally:
        server.api("DELETE", f"/api-keys/{few_id}")


def test_what_was_changed_is_in_the_audit_log_and_no_secret(server, first, second):
    id = first["sandbox"]["sandboxID"]
    mine = {"x-request-id": "audited-by-a-test"}
    assert second.call("POST", f"/sandboxes/{id}/pause", {}, mine)[0] == 404
    wrong = Key(server, "e2b_" + "0" * 40)
    assert wrong.call("GET", "/v2/sandboxes", headers={"x-request-id": "refused-by-a-test"})[0] == 401
    log = server.home / "logs" / "audit.log"
    assert log.stat().st_mode & 0o777 == 0o600
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    tried = next(line for line in lines if line["request"] == "audited-by-a-test")
    assert (tried["team"], tried["status"], tried["path"]) == ("second", 404, f"/sandboxes/{id}/pause")
    refused = next(line for line in lines if line["request"] == "refused-by-a-test")
    assert refused["status"] == 401 and "team" not in refused
    created = [line for line in lines if line["path"] == "/v2/sandboxes" and line.get("made") == id]
    assert created and created[0]["key"] == "first" and created[0]["team"] == "default"
    secrets = [server.key, second.key, wrong.key, first["sandbox"]["envdAccessToken"], first["sandbox"]["trafficAccessToken"]]
    for place in [text, server.log.read_text(errors="replace")]:
        assert not [secret for secret in secrets if secret in place]
    # Nor in what everybody on the host may see of the processes.
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [secret for secret in secrets if secret in shown]
