"""Secrets with the published Python SDK: versions, metadata, pages, and never a value."""

import uuid

import pytest
from e2b import Secret
from e2b.exceptions import SecretException, SecretNotFoundException


def test_secrets(server):
    mark = uuid.uuid4().hex[:8]
    value = f"value-{mark}"
    made = Secret.create(f"Key-{mark}", value, metadata={"owner": "me"})
    try:
        assert (made.name, made.version, made.metadata) == (f"key-{mark}", 1, {"owner": "me"})
        assert made.created_at.tzinfo and made.updated_at >= made.created_at
        with pytest.raises(SecretException, match="409"):
            Secret.create(f"key-{mark}", "again")
        updated = Secret.update(made.name, value + "-2")
        assert (updated.secret_id, updated.version, updated.metadata) == (made.secret_id, 2, {"owner": "me"})
        assert Secret.update(made.secret_id, value, metadata={}).metadata == {}
        assert Secret.get_info(f"KEY-{mark}").version == 3
        others = [Secret.create(f"page-{mark}-{n}", value) for n in range(3)]
        pages, found = Secret.list(limit=2), []
        while pages.has_next:
            page = pages.next_items()
            assert len(page) <= 2
            found += [secret.name for secret in page]
        assert found == sorted(found) and {secret.name for secret in [made, *others]} <= set(found)
        for path in ["/secrets", f"/secrets/{made.secret_id}"]:
            assert value not in str(server.api("GET", path)[1])
        _, key = server.api("POST", "/api-keys", {"name": "other", "team": "secrets-other"})
        assert server.api("GET", f"/secrets/{made.secret_id}", headers={"X-API-Key": key["key"]})[0] == 404
        for secret in others:
            assert Secret.destroy(secret.name)
        for bad in ["sec_mine", "a{b", ""]:
            assert server.api("POST", "/secrets", {"name": bad, "value": "x"})[0] == 400
        assert server.api("GET", "/secrets?nextToken=%25%25")[0] == 400
    finally:
        assert Secret.destroy(made.secret_id)
    assert not Secret.destroy(made.secret_id) and not Secret.exists(made.name)
    with pytest.raises(SecretNotFoundException):
        Secret.update(made.name, "x")
    stored = [file.read_bytes() for file in (server.home / "secrets").iterdir() if file.is_file()]
    assert not any(value.encode() in text for text in stored)
    assert value not in server.log.read_text(errors="replace")
