"""A template build by the API, and what it leaves on the node."""

import contextlib
import json
import sqlite3

from conftest import wait_for


class Build:
    """A build on `base`, and what the API says of it."""

    def __init__(self, server, name, commands, **more):
        self.server, self.name = server, name
        status, asked = server.api("POST", "/v3/templates", {"name": name, "cpuCount": 1, "memoryMB": 512})
        assert status == 202, asked
        self.id, self.path = asked["buildID"], f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
        steps = [{"type": "RUN", "args": [command]} for command in commands]
        body = {"fromTemplate": "base", "steps": steps, **more}
        assert server.api("POST", f"/v2{self.path}", body)[0] == 202
        # It is no other one's to start.
        assert server.api("POST", f"/v2{self.path}", body)[0] == 409

    def status(self, query=""):
        return self.server.api("GET", f"{self.path}/status{query}")[1]

    def log(self, query=""):
        status, answer = self.server.api("GET", f"{self.path}/logs{query}")
        assert status == 200, answer
        return [entry["message"] for entry in answer["logs"]]

    def says(self, text):
        wait_for(f"{text!r} in the log of {self.name}", lambda: text in self.log("?limit=1000"), 120)

    def ends(self, as_what):
        wait_for(f"the end of {self.name}", lambda: self.status()["status"] not in ("building", "waiting"), 300)
        assert self.status()["status"] == as_what, self.status()

    def delete(self):
        assert self.server.api("DELETE", f"/templates/{self.name}")[0] == 204


def hidden(server):
    """The sandboxes of builds, which no list shows."""
    with contextlib.closing(sqlite3.connect(f"file:{server.home}/journal.db?mode=ro", uri=True)) as journal:
        records = [json.loads(text) for [text] in journal.execute("SELECT record FROM sandbox")]
    return {record["id"] for record in records if record["hidden"]}


def vmms_of(server, ids):
    return [pid for pid, files in server.vmms().items() if any(id in file for file in files for id in ids)]
