#!/usr/bin/env python3
"""A soak: agents that create, run, fork, fork forks, pause, resume, snapshot, roll back and kill, for as long as it is told.

usage: .venv/bin/python tests/soak.py [--minutes 120] [--agents 3] [--paused 50] [--seed 1]    (`make soak`)

So many paused sandboxes are there all the time; at the end the server is killed and started again beside them, a burst of
creates comes, and some of them go on. A first tenth of the time warms up. Then, and again at the end, everything is removed and what is left is counted: memory,
descriptors and threads of server and blockd, files, namespaces, mounts, VMMs. Exit code 1 when something has grown, when a
state was not the one that was left there, or when the server logged an error. A line of JSON each half minute.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import LONG, running_server, wait_for  # noqa: E402

#: Growth that is allowed between the two counts.
MORE_KIB, MORE_THREADS, MORE_FILES = 16 << 10, 4, 20
EVERY_SECONDS = 30


class Agent(threading.Thread):
    """Lives one sandbox after the other. What a sandbox must know is written down beside it."""

    def __init__(self, soak, number):
        super().__init__(daemon=True)
        self.soak, self.random = soak, random.Random(soak.seed * 1000 + number)
        self.name = f"agent-{number}"

    def run(self):
        while not self.soak.over.is_set():
            try:
                self.life()
                self.soak.count("lives")
            except Exception as error:  # noqa: BLE001 - a soak tells of everything, and goes on
                self.soak.fault(f"{self.name}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=3)}")

    def life(self):
        from e2b import Sandbox

        sandbox, mine = Sandbox.create("base", timeout=LONG), []
        try:
            sleeper = sandbox.commands.run("sleep 86400", background=True, timeout=0)
            step = 0
            for _ in range(self.random.randint(3, 8)):
                step += 1
                sandbox.commands.run(f"head -c {self.random.randint(1, 24)}M /dev/urandom >/dev/shm/f; echo {step} >/home/user/step")
                verb = self.random.choice(["command", "pause", "fork", "snapshot", "rollback"])
                sandbox = getattr(self, verb)(sandbox, step, mine)
                self.check(sandbox, step)
                self.soak.count(verb)
            assert any(process.pid == sleeper.pid for process in sandbox.commands.list()), "its process is gone"
        finally:
            sandbox.kill()
            for snapshot in mine:
                Sandbox.delete_snapshot(snapshot)

    def check(self, sandbox, step):
        found = sandbox.files.read("/home/user/step").strip()
        assert found == str(step), f"step {found} is there, not {step}"

    def command(self, sandbox, _step, _mine):
        assert sandbox.commands.run("echo $((6 * 7))").stdout == "42\n"
        return sandbox

    def pause(self, sandbox, _step, _mine):
        from e2b import Sandbox

        sandbox.pause()
        return Sandbox.connect(sandbox.sandbox_id, timeout=LONG)

    def fork(self, sandbox, step, _mine, depth=1):
        children = sandbox.fork(count=self.random.randint(1, 3), timeout=LONG)
        try:
            for child in children:
                self.check(child, step)
                child.files.write("/home/user/step", "a child's")
            if depth < 3:
                grand = children[0]
                grand.files.write("/home/user/step", str(step))
                self.fork(grand, step, None, depth + 1)
        finally:
            for child in children:
                child.kill()
        return sandbox

    def snapshot(self, sandbox, step, mine):
        from e2b import Sandbox

        made = sandbox.create_snapshot().snapshot_id
        mine.append(made)
        copy = Sandbox.create(made, timeout=LONG)
        try:
            self.check(copy, step)
        finally:
            copy.kill()
        return sandbox

    def rollback(self, sandbox, _step, mine):
        made = sandbox.create_snapshot().snapshot_id
        mine.append(made)
        sandbox.files.write("/home/user/step", "to be forgotten")
        self.soak.server.cli("rollback", sandbox.sandbox_id, made)
        return sandbox


class Soak:
    def __init__(self, server, seed):
        self.server, self.seed = server, seed
        self.over, self.lock = threading.Event(), threading.Lock()
        self.counts, self.faults, self.paused = collections.Counter(), [], []

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def fault(self, text):
        with self.lock:
            self.faults.append(text)
        print(text, file=sys.stderr, flush=True)

    def load(self, agents, seconds):
        """Runs agents for so long; their last lives are ended."""
        self.over.clear()
        threads = [Agent(self, number) for number in range(agents)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(EVERY_SECONDS, max(0.1, until - time.monotonic())))
            print(json.dumps({"at": round(time.time()), "counts": dict(self.counts), "faults": len(self.faults), **self.sizes()}), flush=True)
        self.over.set()
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def sizes(self):
        found = {}
        for name in ("server", "blockd"):
            process = Path(f"/proc/{self.server.pid(name)}")
            found[f"{name}Kib"] = self.server.memory_kib(name, "RssAnon")
            found[f"{name}Files"] = len(list((process / "fd").iterdir()))
            found[f"{name}Threads"] = len(list((process / "task").iterdir()))
        return found

    def pause_many(self, many):
        """Sandboxes that are paused over the whole soak."""
        from e2b import Sandbox

        for number in range(many):
            sandbox = Sandbox.create("base", timeout=LONG, metadata={"soak": "paused"})
            sandbox.files.write("/home/user/step", str(number))
            sandbox.pause()
            self.paused.append(sandbox.sandbox_id)

    def restart(self):
        """kill -9, and how many seconds it takes until the server answers again."""
        self.server.kill()
        began = time.monotonic()
        self.server.start()
        return round(time.monotonic() - began, 2)

    def burst(self):
        """Creates at once, as many as do not fit: each is answered."""
        done = self.server.cli("bench", "burst", "-n", 60, "--seconds", 100, "--server-binary", "/bin/false", check=False)
        rows = {row["operation"]: row["n"] for row in json.loads(done.stdout)["results"]}
        if done.returncode != 0:
            self.fault(f"burst: {done.returncode}: {rows}")
        return rows

    def go_on(self, some=5):
        """Some of the paused ones have what they had."""
        from e2b import Sandbox

        for number in random.Random(self.seed).sample(range(len(self.paused)), min(some, len(self.paused))):
            found = Sandbox.connect(self.paused[number], timeout=LONG).files.read("/home/user/step")
            if found != str(number):
                self.fault(f"paused sandbox {number} has {found}")

    def left(self, settle):
        """What is there when nothing runs, and what was of use just now is of use no more."""
        def only_paused():
            there = self.server.api("GET", "/v2/sandboxes?limit=100&state=running")[1]
            return not there and not self.server.api("GET", "/snapshots")[1]

        wait_for("everything's end", only_paused, 120)
        self.server.cli("repo", "gc")
        time.sleep(settle)
        # What happened to a sandbox stays to be read for a while.
        folders = [folder for folder in self.server.home.iterdir() if folder.is_dir() and folder.name != "logs"]
        count = lambda folder: sum(len(files) for _, _, files in os.walk(folder))
        lines = lambda *words: len(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines())
        return {
            **self.sizes(),
            **{f"files in {folder.name}": count(folder) for folder in folders},
            "runtimeFiles": count(self.server.runtime),
            "mounts": sum(str(self.server.runtime) in line for line in Path("/proc/mounts").read_text().splitlines()),
            "namespaces": lines("ip", "netns", "list"),
            "vmms": len(self.server.vmms()),
        }

    def grown(self, before, after):
        allowed = lambda name: (
            MORE_KIB if name.endswith("Kib") else MORE_THREADS if name.endswith("Threads") else MORE_FILES
        )
        return {name: (before[name], after[name]) for name in before if after[name] > before[name] + allowed(name)}

    def errors(self):
        return [line for line in self.server.log.read_text(errors="replace").splitlines() if " ERROR " in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--paused", type=int, default=50)
    # A node keeps for ten minutes what it needed.
    parser.add_argument("--settle", type=float, default=720, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    home = tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    settings = ["network.internal.veth_cidr=10.220.0.0/16", "snapshot.gc_interval_secs=0", "snapshot.gc_grace_secs=0"]
    with running_server(home, settings) as server:
        os.environ.update(server.env)
        soak = Soak(server, args.seed)
        soak.pause_many(args.paused)
        soak.load(args.agents, args.minutes * 6)
        before = soak.left(args.settle)
        soak.load(args.agents, args.minutes * 54)
        after = soak.left(args.settle)
        ready, burst = soak.restart(), soak.burst()
        soak.go_on()
        grown, errors = soak.grown(before, after), soak.errors()
    report = {"counts": dict(soak.counts), "readySeconds": ready, "burst": burst, "before": before, "after": after, "grown": grown, "faults": soak.faults, "errors": errors}
    print(json.dumps(report, indent=1))
    return int(bool(grown or errors or soak.faults))


if __name__ == "__main__":
    sys.exit(main())
