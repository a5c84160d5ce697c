"""`mcp` of a create: the server keeps it, and the SDK starts the template's gateway."""

import json

import pytest
from e2b import Sandbox, SandboxException, Template

SERVERS = {"exa": {"apiKey": "not a key"}}

#: Does what the SDK relies on in a gateway: reads its config, and leaves its token where a later connect finds it.
GATEWAY = """#!/bin/sh
set -e
test "$1" = --config
mkdir -p /etc/mcp-gateway
printf %s "$2" > /etc/mcp-gateway/config
printf %s "$GATEWAY_ACCESS_TOKEN" > /etc/mcp-gateway/.token
"""


@pytest.fixture
def template(server, tmp_path):
    (tmp_path / "mcp-gateway").write_text(GATEWAY)
    recipe = (
        Template(file_context_path=tmp_path)
        .from_template("base")
        .copy("mcp-gateway", "/usr/local/bin/mcp-gateway", user="root", mode=0o755)
    )
    # The name that the SDK asks for when there is an `mcp` and no template.
    Template.build(recipe, "mcp-gateway", cpu_count=1, memory_mb=512)
    yield
    assert server.api("DELETE", "/templates/mcp-gateway")[0] == 204


@pytest.mark.compat("python", "Sandbox.create(mcp)", "Sandbox.get_mcp_url", "Sandbox.get_mcp_token")
def test_the_gateway_of_a_template_is_started(server, template):
    sandbox = Sandbox.create(mcp=SERVERS, timeout=600)
    assert json.loads(sandbox.files.read("/etc/mcp-gateway/config", user="root")) == SERVERS
    token = sandbox.get_mcp_token()
    assert token
    # What another client connects to has the same.
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.get_mcp_token() == token
    assert again.get_mcp_url().endswith("/mcp")
    assert server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[1]["mcp"] == SERVERS
    sandbox.kill()


def test_without_a_gateway_nothing_stays(server):
    before = {entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1]}
    with pytest.raises(SandboxException, match="MCP gateway"):
        Sandbox.create("base", mcp=SERVERS, timeout=600)
    assert {entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1]} == before
