"""Lists of sandboxes, as the Python SDK asks for them."""

import uuid
from datetime import timedelta

import pytest
from conftest import LONG
from e2b import Sandbox, SandboxQuery, SandboxState

ODD = {"a b": "c&d=é%", "+": "100 %"}


@pytest.fixture(scope="module")
def three(server):
    """A mark, and three sandboxes that carry it, oldest first; the second is paused."""
    mark = uuid.uuid4().hex
    made = [Sandbox.create("base", timeout=LONG, metadata={"mark": mark, "number": str(n), **ODD}) for n in range(3)]
    assert made[1].pause()
    yield mark, made
    for sandbox in made:
        sandbox.kill()


def ids(query, **options):
    """All pages of a list, one after the other."""
    pages, found = Sandbox.list(query, **options), []
    while pages.has_next:
        found += [entry.sandbox_id for entry in pages.next_items()]
    return found


@pytest.mark.compat("python", "Sandbox.list")
def test_order_and_pages(three):
    mark, made = three
    oldest_first = [sandbox.sandbox_id for sandbox in made]
    query = SandboxQuery(metadata={"mark": mark})
    assert ids(query) == oldest_first[::-1]
    assert ids(query, order="asc") == oldest_first
    # Page by page over both states; a page that was exactly full is the last when nothing follows.
    pages = Sandbox.list(query, limit=1)
    for id in oldest_first[::-1]:
        assert pages.has_next
        assert [entry.sandbox_id for entry in pages.next_items()] == [id]
    assert not pages.has_next
    assert ids(query, limit=2, order="asc") == oldest_first


def test_filters(three):
    mark, made = three
    first, second, third = (sandbox.sandbox_id for sandbox in made)
    assert ids(SandboxQuery(metadata={"mark": mark, "number": "0"})) == [first]
    assert ids(SandboxQuery(metadata={"mark": mark, **ODD})) == [third, second, first]
    assert ids(SandboxQuery(metadata={"mark": mark, "number": "7"})) == []
    assert ids(SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])) == [second]
    assert ids(SandboxQuery(metadata={"mark": mark}, state=[SandboxState.RUNNING, SandboxState.PAUSED])) == [third, second, first]
    assert ids(SandboxQuery(metadata={"mark": mark}, template="base")) == [third, second, first]
    assert ids(SandboxQuery(template="no-such-template")) == []
    started = made[2].get_info().started_at
    assert ids(SandboxQuery(metadata={"mark": mark}, started_after=started)) == [third]
    assert ids(SandboxQuery(metadata={"mark": mark}, started_after=started + timedelta(seconds=1))) == []


@pytest.mark.compat("python", "Sandbox.get_info", "Sandbox.kill")
def test_entries_and_the_end_of_one(server, three):
    mark, made = three
    info = made[0].get_info()
    (entry,) = Sandbox.list(SandboxQuery(metadata={"mark": mark, "number": "0"})).next_items()
    assert entry.metadata == info.metadata == {"mark": mark, "number": "0", **ODD}
    assert (entry.started_at, entry.end_at, entry.state) == (info.started_at, info.end_at, SandboxState.RUNNING)
    assert info.started_at.tzinfo and info.end_at.tzinfo and info.name == "base"
    for raw in server.api("GET", "/v2/sandboxes")[1]:
        assert raw["clientID"] and raw["metadata"] is not None
    assert Sandbox.kill(made[0].sandbox_id) and not Sandbox.kill(made[0].sandbox_id)
    assert ids(SandboxQuery(metadata={"mark": mark, "number": "0"})) == []
