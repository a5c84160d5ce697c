"""Calls of the control plane beside the life of a sandbox: metrics, idempotency, MCP, and what bodies may look like."""

import http.client
import json
import time
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from conftest import wait_for
from e2b import Sandbox, SandboxException, SandboxQuery, Template


@pytest.mark.compat("python", "Sandbox.get_metrics")
def test_metrics(shared):
    samples = wait_for("the first sample", shared.get_metrics, 60, every=0.5)
    last = samples[-1]
    assert last.cpu_count == 1 and last.cpu_used_pct >= 0
    assert 0 < last.mem_used < last.mem_total and last.mem_cache >= 0 and 0 < last.disk_used < last.disk_total
    assert [sample.timestamp for sample in samples] == sorted(sample.timestamp for sample in samples)
    before = datetime.now(timezone.utc) - timedelta(hours=1)
    assert shared.get_metrics(start=before - timedelta(hours=1), end=before) == []


def test_an_idempotency_key_makes_one_sandbox(server):
    key = str(uuid.uuid4())
    made = [Sandbox.create("base", timeout=120, idempotency_key=key) for _ in range(2)]
    assert made[0].sandbox_id == made[1].sandbox_id
    with pytest.raises(SandboxException, match="422"):
        Sandbox.create("base", timeout=121, idempotency_key=key)
    assert made[0].kill() and not made[1].kill()


def test_a_gateway_that_is_not_there_leaves_no_sandbox(server):
    """The field `mcp` is stored; the client starts the gateway by itself, and removes the sandbox when there is none."""
    mark = uuid.uuid4().hex
    with pytest.raises(SandboxException, match="Failed to start MCP gateway"):
        Sandbox.create("base", timeout=120, metadata={"mark": mark}, mcp={"browserbase": {"apiKey": "none"}})
    assert Sandbox.list(SandboxQuery(metadata={"mark": mark})).next_items() == []


def send(server, method, path, pieces, headers=None):
    """(status, parsed body) of a request whose body is sent in pieces of unknown number."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"X-API-Key": server.key, "Content-Type": "application/json", **(headers or {})}
    connection.request(method, path, body=iter(pieces), headers=headers, encode_chunked=True)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


@pytest.mark.compat("http", "POST /sandboxes", "POST /v2/sandboxes", "POST /sandboxes/{id}/pause", "POST /sandboxes/{id}/connect")
def test_bodies_in_pieces_and_old_forms(server):
    # In chunks, with a field and a header that nobody knows.
    body = [b'{"templateID": "ba', b'se", "timeout": 600, "unknown": {"a": [1]}}']
    status, made = send(server, "POST", "/v2/sandboxes", body, {"X-Unknown": "1"})
    assert status == 201 and made["envdAccessToken"] and made["clientID"] and not made.get("domain")
    id = made["sandboxID"]
    assert send(server, "POST", f"/sandboxes/{id}/pause", [b"{}"]) == (204, None)
    status, again = send(server, "POST", f"/v2/sandboxes/{id}/connect", [b"{}"])
    assert status == 201 and again["envdAccessToken"] == made["envdAccessToken"] and again["clientID"]
    # The long form of the id; a pause without a body.
    assert server.api("POST", f"/sandboxes/{id}-aenv/connect", {"timeout": 60})[0] == 200
    assert server.api("POST", f"/sandboxes/{id}/pause")[0] == 204
    assert server.api("POST", f"/sandboxes/{id}/pause")[0] == 409
    assert server.api("DELETE", f"/sandboxes/{id}")[0] == 204
    # The first version's create makes a token only when it is asked to.
    for secure in [True, False]:
        body = {"templateID": "base", "timeout": 60, "secure": secure}
        status, made = server.api("POST", "/sandboxes", body)
        assert status == 201 and bool(made.get("envdAccessToken")) is secure
        assert server.api("DELETE", f"/sandboxes/{made['sandboxID']}")[0] == 204


def test_the_same_path_of_two_planes(server, shared):
    """With the routing header `/health` is the sandbox's, without it the server's."""
    assert server.api("GET", "/health")[0] == 204
    assert server.api("GET", "/health", headers={"E2b-Sandbox-Id": shared.sandbox_id})[0] == 204
    status, answer = server.api("GET", "/health", headers={"E2b-Sandbox-Id": "i" + "0" * 19})
    assert status == 502 and answer["message"] == "The sandbox was not found"


@pytest.mark.compat("python", "Template.exists", "Template.assign_tags", "Template.get_tags", "Template.remove_tags")
def test_names_and_tags(server):
    assert Template.exists("base") is True and Template.exists(uuid.uuid4().hex) is False
    tag = f"t{int(time.time())}"
    assert Template.assign_tags("base:default", [tag]).tags == [tag]
    assert tag in [entry.tag for entry in Template.get_tags("base")]
    made = Sandbox.create(f"base:{tag}", timeout=60)
    assert made.kill()
    Template.remove_tags("base", tag)
    assert tag not in [entry.tag for entry in Template.get_tags("base")]
    with pytest.raises(Exception, match="404"):
        Sandbox.create(f"base:{tag}", timeout=60)
    for target in [":x", "base:"]:
        status, answer = server.api("POST", "/templates/tags", {"target": target, "tags": ["y"]})
        assert (status, answer["code"]) == (400, 400)
