"""What leaves a sandbox: names, DNS, header rules, an upstream proxy; with the published SDK, real VMs, and a small internet."""

import base64
import json
import shlex
import tempfile
import uuid

import pytest
from e2b import Sandbox, Secret

from conftest import LONG, wait_for
from internet import LOGIN, NAMELESS, OTHER, PROXY, SITE, Internet

ALL = "0.0.0.0/0"
SECRET = "Bearer of-the-host-only"

# Asks a resolver directly, as a tunnel would: `ask.py SERVER NAME TYPE tcp|udp` prints the answer's code, or `no answer`.
ASK = r"""
import socket, struct, sys
server, name, kind, way = sys.argv[1:]
question = b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\0" + struct.pack(">HH", int(kind), 1)
query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + question
try:
    if way == "udp":
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(10)
        s.sendto(query, (server, 53)); reply = s.recv(4096)
    else:
        s = socket.create_connection((server, 53), 10); s.settimeout(10)
        s.sendall(struct.pack(">H", len(query)) + query)
        stream = s.makefile("rb"); reply = stream.read(struct.unpack(">H", stream.read(2))[0])
    print("code", reply[3] & 15, "answers", struct.unpack(">H", reply[6:8])[0])
except (OSError, struct.error):
    print("no answer")
"""


@pytest.fixture(scope="module")
def internet(server):
    made = Internet(server.test_ca.parent, tempfile.mkdtemp(prefix="aenv-internet-", dir=server.home))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="module")
def sandbox(internet):
    """One for all tests of this file: each replaces its rules."""
    made = Sandbox.create("base", timeout=LONG, network=named(internet, "site.test", "*.site.test", "inside.test"))
    made.files.write("/tmp/ask.py", ASK)
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def nothing_seen(internet):
    internet.forget()


def named(internet, *names, **more):
    return {"allow_out": list(names), "deny_out": [ALL], "dns_servers": [internet.address(SITE)], **more}


def each(sandbox, *commands):
    """Runs commands in the guest, in one call; (exit code, output) of each."""
    parts = [f"out=$({command} 2>&1); echo $?; echo \"$out\" | base64 -w0; echo" for command in commands]
    lines = sandbox.commands.run("\n".join(parts), timeout=600).stdout.splitlines()
    return [(int(code), base64.b64decode(text).decode().strip()) for code, text in zip(lines[::2], lines[1::2])]


def curl(url, *words):
    # -k: the test CA is nobody's in the guest. Whom the gate believes is another matter.
    return shlex.join(["curl", "-sS", "-k", "--connect-timeout", "30", "--max-time", "60", *words, url])


def test_names_are_reached_and_others_are_not(sandbox, internet):
    site, other = internet.address(SITE), internet.address(OTHER)
    reached = each(sandbox, curl("http://site.test/"), curl("https://site.test/"), curl("https://www.site.test/"))
    assert reached == [(0, f"this is {site}")] * 3
    refused = each(
        sandbox,
        curl("https://other.test/"),
        curl("https://other.test/", "--resolve", f"other.test:443:{other}"),
        curl("http://other.test/", "--resolve", f"other.test:80:{other}"),
        curl(f"https://{other}/"),
        curl(f"http://{other}/"),
        curl(f"http://{other}:8080/"),
        curl("http://inside.test/"),
    )
    assert all(code != 0 for code, _ in refused), refused
    assert not internet.events("connection", at=other) and not internet.events("dns", name="other.test")


def test_a_lie_about_the_name_or_the_address_gains_nothing(sandbox, internet):
    site, nameless = internet.address(SITE), internet.address(NAMELESS)
    lies = each(
        sandbox,
        curl("https://site.test/", "--resolve", f"site.test:443:{nameless}"),
        curl(f"http://{nameless}/", "-H", "Host: site.test"),
        curl("http://site.test/", "-H", "Host: other.test"),
        curl("https://other.test/", "--connect-to", "::site.test:"),
        f"printf 'GET / HTTP/1.1\\r\\nHost: site.test\\r\\nHost: other.test\\r\\n\\r\\n' | timeout 8 curl -sS telnet://{site}:80",
    )
    # The first two reach the name that they claim, and not the address that they meant.
    assert lies[:2] == [(0, f"this is {site}")] * 2
    assert all("this is" not in text for _, text in lies[2:]), lies
    assert not internet.events("connection", at=nameless)


def test_dns_carries_nothing_out(sandbox, internet):
    site, other = internet.address(SITE), internet.address(OTHER)
    ask = lambda server, name, kind, way: f"python3 /tmp/ask.py {server} {name} {kind} {way}"
    answers = [text for _, text in each(
        sandbox,
        ask(site, "site.test", 1, "udp"),
        ask(other, "site.test", 1, "tcp"),
        ask(site, "site.test", 28, "udp"),
        ask(site, "secret.site.test.evil.test", 16, "udp"),
        ask(other, "secret.evil.test", 1, "udp"),
        ask(other, "secret.evil.test", 16, "tcp"),
    )]
    assert answers[:3] == ["code 0 answers 1", "code 0 answers 1", "code 0 answers 0"]
    assert answers[3:] == ["code 5 answers 0"] * 3
    assert not [seen for seen in internet.events("dns") if "secret" in seen["name"]]

    sandbox.update_network({"allow_internet_access": False})
    answers = [text for _, text in each(
        sandbox, ask(site, "site.test", 1, "udp"), ask(site, "secret.site.test", 16, "tcp"),
        curl("https://site.test/", "--resolve", f"site.test:443:{site}"),
    )]
    assert all("code 0" not in text and "this is" not in text for text in answers), answers
    assert not [seen for seen in internet.events("dns") if "secret" in seen["name"]]


def test_new_rules_hold_at_once(sandbox, internet):
    site, other, nameless = map(internet.address, (SITE, OTHER, NAMELESS))
    sandbox.update_network(named(internet, "site.test"))
    stream = sandbox.commands.run(curl("https://site.test/stream", "-N", "--max-time", "120"), background=True)
    wait_for("the stream", lambda: internet.events("http", path="/stream"))
    sandbox.update_network(named(internet, "other.test"))
    wait_for("the stream's end", lambda: internet.events("stream ended"))
    with pytest.raises(Exception, match="exit"):
        stream.wait()
    found = each(sandbox, curl("https://other.test/"), curl("https://site.test/"))
    assert found[0] == (0, f"this is {other}") and found[1][0] != 0

    # Resolvers are replaced as well, and an address needs no name.
    sandbox.update_network({"dns_servers": [other]})
    found = each(sandbox, "cat /etc/resolv.conf", curl("http://site.test/"), curl(f"http://{nameless}/"))
    assert f"nameserver {other}" in found[0][1]
    assert [text for _, text in found[1:]] == [f"this is {site}", f"this is {nameless}"]


def obeys(one, internet):
    found = each(one, curl("https://site.test/"), curl("https://other.test/"))
    assert found[0] == (0, f"this is {internet.address(SITE)}") and found[1][0] != 0, found


def test_names_survive_pause_fork_and_a_killed_server(server, sandbox, internet):
    sandbox.update_network(named(internet, "site.test"))
    [child] = sandbox.fork(count=1)
    obeys(child, internet)
    child.kill()
    sandbox.pause()
    sandbox.connect(timeout=LONG)
    obeys(sandbox, internet)
    server.kill()
    server.start()
    obeys(sandbox, internet)


def test_headers_that_the_guest_does_not_know(server, sandbox, internet):
    rules = {"site.test": [{"transform": {"headers": {"Authorization": SECRET, "X-Team": "blue"}}}]}
    sandbox.update_network(named(internet, "site.test", "other.test", rules=rules))
    fetch = "import urllib.request as u; print(u.urlopen('https://site.test/py', timeout=60).read().decode())"
    strict = "curl -sS --max-time 60 https://site.test/{}"
    found = each(
        sandbox,
        strict.format("own") + " -H 'Authorization: mine'",
        f"python3 -c {shlex.quote(fetch)}",
        curl("http://site.test/plain"),
        curl("https://other.test/without"),
        strict.format("lie") + " -H 'Host: other.test'",
        "curl -sS --max-time 60 https://other.test/",
    )
    assert [code for code, _ in found[:4]] == [0] * 4, found
    for path in ("/own", "/py", "/plain"):
        [seen] = internet.events("http", path=path)
        assert (seen["headers"]["authorization"], seen["headers"]["x-team"]) == (SECRET, "blue")
        assert seen["tls"] == (path != "/plain")
    assert "authorization" not in internet.events("http", path="/without")[0]["headers"]
    assert not internet.events("http", path="/lie") and "another host" in found[4][1]
    assert found[5][0] == 60, "a host without rules shows its own certificate, which the guest does not believe"

    # Secrets go out by name: with the value of the moment, or not at all.
    name = f"egress-{uuid.uuid4().hex[:8]}"
    Secret.create(name, "first")
    try:
        by_name = {"site.test": [{"transform": {"headers": {"X-Key": f"Bearer {Secret.fill(name)}"}}}]}
        sandbox.update_network(named(internet, "site.test", rules=by_name))
        assert "first" not in str(server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[1])
        assert each(sandbox, strict.format("first"))[0][0] == 0
        Secret.update(name, "second")
        assert each(sandbox, strict.format("second"))[0][0] == 0
    finally:
        Secret.destroy(name)
    code, text = each(sandbox, strict.format("gone"))[0]
    assert code == 0 and "cannot be used" in text and name not in text
    for path, value in [("/first", "Bearer first"), ("/second", "Bearer second")]:
        assert internet.events("http", path=path)[0]["headers"]["x-key"] == value
    assert not internet.events("http", path="/gone")

    # A rule alone allows nothing.
    sandbox.update_network(named(internet, "other.test", rules=rules))
    assert each(sandbox, curl("https://site.test/"))[0][0] != 0


def test_connections_leave_through_the_proxy(server, sandbox, internet):
    site, nameless = internet.address(SITE), internet.address(NAMELESS)
    proxy = {"address": "proxy.test:1080", "username": LOGIN[0], "password": LOGIN[1]}
    sandbox.update_network(named(internet, "site.test", nameless, egress_proxy=proxy))
    found = each(sandbox, curl("https://site.test/"), curl(f"http://{nameless}/"), curl("https://other.test/"))
    assert found[:2] == [(0, f"this is {site}"), (0, f"this is {nameless}")] and found[2][0] != 0
    seen = internet.events("socks")
    assert [one["target"] for one in seen] == [f"{site}:443", f"{nameless}:80"]
    assert all(tuple(one["login"]) == LOGIN for one in seen)

    shown = server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[1]["network"]
    assert shown["egressProxy"] == {"address": "proxy.test:1080", "username": LOGIN[0]}
    assert LOGIN[1] not in server.log.read_text(errors="replace")

    # There is no other way out when the proxy is not there.
    internet.forget()
    sandbox.update_network({"dns_servers": [site], "egress_proxy": {"address": f"{internet.address(PROXY)}:1081"}})
    assert each(sandbox, curl(f"http://{nameless}/"))[0][0] != 0
    assert not internet.events("connection", at=nameless)


@pytest.mark.parametrize("network", [
    {"allowOut": ["site.test"]},
    {"allowOut": ["site.test"], "denyOut": ["8.8.8.8"]},
    {"denyOut": ["site.test"]},
    {"egressProxy": {"address": "nowhere"}},
    {"rules": {"8.8.8.8": []}},
    {"rules": {"site.test": [{"transform": {"headers": {"Host": "x"}}}]}},
])
def test_what_means_nothing_is_refused(server, sandbox, network):
    for method, path, body in (
        ("POST", "/v2/sandboxes", {"templateID": "base", "network": network}),
        ("PUT", f"/sandboxes/{sandbox.sandbox_id}/network", network),
    ):
        status, answer = server.api(method, path, body)
        assert (status, answer["code"]) == (400, 400), json.dumps(answer)
