"""What passes the proxy: signed URLs, traffic tokens, masked hosts, and streams that end with their sandbox."""

import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from conftest import LONG
from e2b import Sandbox
from guest import get, serve


def fetch(url, data=None, headers=None):
    """(status, text) of a request without any key."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers or {}), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


FORM = (
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="whatever"\r\nContent-Type: application/octet-stream\r\n\r\n'
    b"uploaded\r\n--edge--\r\n"
)


@pytest.mark.compat("python", "Sandbox.download_url", "Sandbox.upload_url")
@pytest.mark.parametrize("user", ["user", "root"])
def test_signed_urls(shared, user):
    home = {"user": "/home/user", "root": "/root"}[user]
    name = f"signed by {user}.txt"
    url = shared.upload_url(name, user, use_signature_expiration=60)
    status, answer = fetch(url, FORM, {"Content-Type": "multipart/form-data; boundary=edge"})
    assert (status, answer.strip()) == (200, f'[{{"name":"{name}","path":"{home}/{name}","type":"file"}}]')
    assert fetch(shared.download_url(name, user, use_signature_expiration=60)) == (200, "uploaded")
    assert fetch(shared.download_url(name, user)) == (200, "uploaded")
    assert shared.commands.run(f"stat -c %U '{home}/{name}'", user="root").stdout.strip() == user


def test_signatures_that_are_old_or_wrong(shared):
    shared.files.write("signed", "x")
    old = shared.download_url("signed", use_signature_expiration=-10)
    assert fetch(old) == (401, '{"code":401,"message":"signature is already expired"}')
    good = shared.download_url("signed", use_signature_expiration=60)
    other = urllib.parse.parse_qs(urllib.parse.urlsplit(shared.download_url("else")).query)["signature"][0]
    signature = urllib.parse.parse_qs(urllib.parse.urlsplit(good).query)["signature"][0]
    forged = good.replace(urllib.parse.quote(signature, safe=""), urllib.parse.quote(other, safe=""))
    assert forged != good
    assert fetch(forged) == (401, '{"code":401,"message":"invalid signature"}')


@pytest.mark.compat("python", "Sandbox.traffic_access_token")
def test_private_ports_and_a_masked_host(server):
    mask = {"allow_public_traffic": False, "mask_request_host": "custom-host.example.com:${PORT}"}
    sandbox = Sandbox.create("base", timeout=LONG, network=mask)
    token = {"e2b-traffic-access-token": sandbox.traffic_access_token}
    serve(server, sandbox, 8080, token)
    status, seen = get(server, sandbox, 8080, token)
    assert status == 200 and "host: custom-host.example.com:8080\r\n" in seen.lower()
    assert sandbox.traffic_access_token not in seen
    assert get(server, sandbox, 8080)[0] == 403
    assert get(server, sandbox, 8080, {"e2b-traffic-access-token": "wrong"})[0] == 403
    assert sandbox.files.write("open", "envd asks for its own token only").path == "/home/user/open"
    assert sandbox.kill()
    assert get(server, sandbox, 8080, token)[0] == 502


def test_a_kill_breaks_what_runs(server):
    sandbox = Sandbox.create("base", timeout=LONG)
    running = sandbox.commands.run("echo begun; sleep 3600", background=True, timeout=0)
    began = []
    for out, _, _ in running:
        began.append(out)
        break
    assert began == ["begun\n"]
    assert sandbox.kill()
    before = time.monotonic()
    with pytest.raises(Exception, match="sandbox was killed or reached its end of life"):
        running.wait()
    assert time.monotonic() - before < 30
    assert not sandbox.is_running()
