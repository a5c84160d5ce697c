"""Many sandboxes that expire together are all handled within 3 s of their deadline."""

import time

from conftest import wait_for

COUNT = 50


def test_fifty_at_once(server):
    made = []
    try:
        while len(made) < COUNT:
            body = {"count": min(10, COUNT - len(made)), "templateID": "base", "timeout": 3600, "metadata": {"expiry": "50"}}
            status, results = server.api("POST", "/sandboxes/batch", body)
            assert status == 201, results
            made += [result["sandbox"]["sandboxID"] for result in results]
        # One deadline for all, far enough away that setting it for each is over before.
        seconds = 20
        deadline = time.time() + seconds
        for id in made:
            left = max(1, round(deadline - time.time()))
            assert server.api("POST", f"/sandboxes/{id}/timeout", {"timeout": left})[0] == 204
        wait_for("the deadline", lambda: time.time() >= deadline, seconds + 5)
        listed = lambda: {e["sandboxID"]: e["state"] for e in server.api("GET", "/v2/sandboxes")[1]}

        def handled():
            states = listed()
            return all(states.get(id) in (None, "paused") for id in made)

        wait_for("the end of all", handled, 3.5)
    finally:
        for id in made:
            server.api("DELETE", f"/sandboxes/{id}")
