"""`aenv bench`: tiny runs of its suites. What they say has its form, and nothing of what they made stays."""

import json
import os
import re
import signal
import subprocess

from conftest import BIN, ROOT, wait_for


def things(server):
    """Ids of all sandboxes and snapshots."""
    sandboxes = {entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1]}
    return sandboxes | {entry["snapshotID"] for entry in server.api("GET", "/snapshots")[1]}


def bench(server, suite, *words):
    before = things(server)
    # This binary measures no floor, which would take longer than all else.
    done = server.cli("bench", suite, "--server-binary", "/bin/false", *words)
    assert things(server) <= before
    report = json.loads(done.stdout)
    assert report["suite"] == suite and report["unit"] == "ms" and report["floor"] is None
    assert report["machine"]["cores"] >= 1 and report["machine"]["virtualization"]
    for row in report["results"]:
        assert not row.get("failed") and not row.get("errors"), row
    return {row["operation"]: row for row in report["results"]}, report


def limits():
    """The ratios of SPECIFICATION.md that CI holds, by operation."""
    section = (ROOT / "SPECIFICATION.md").read_text().split("## What CI holds")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([0-9.]+) \|$", section, re.MULTILINE)
    return {operation: float(limit) for operation, limit in rows}


def timed(row):
    return row["n"] >= 1 and 0 < row["p50"] <= row["p90"] <= row["p99"] and row["ratio"] is None


def test_forks(server):
    rows, report = bench(server, "forks", "-n", 1, "--children", "1,3")
    one, three = rows["fork 1 .. all answer"], rows["fork 3 .. all answer"]
    assert timed(one) and timed(three)
    assert (one["answered"], three["answered"], three["children"]) == (1, 3, 3)
    assert [point[0] for point in report["plots"][0]["lines"][0]["points"]] == [1, 3]


def test_repeat(server):
    (row,) = bench(server, "repeat", "-n", 3)[0].values()
    assert timed(row) and row["n"] == 3 and row["growth"] > 0


def test_sizes(server):
    rows, _ = bench(server, "sizes", "-n", 1, "--mib", "0,60000")
    assert timed(rows["pause, 0 MiB changed"]) and timed(rows["create from the snapshot, 0 MiB changed"])
    too_large = rows["resume, 60000 MiB changed"]
    assert too_large["n"] == 0 and too_large["p50"] is None and "MiB available" in too_large["skipped"]


def test_burst(server):
    rows, _ = bench(server, "burst", "-n", 3)
    assert rows["create: 201"]["n"] == 3 and timed(rows["create: 201"])
    assert timed(rows["all creates .. the last answer"])


def test_mixed_and_its_page(server, tmp_path):
    page, kept = tmp_path / "page.html", tmp_path / "report.json"
    rows, report = bench(server, "mixed", "-n", 2, "--seconds", 5, "--html", page)
    assert all(timed(row) for row in rows.values())
    assert rows["command round trip"]["n"] >= 10 and rows["fork 2 .. all answer"]["answered"] >= 4
    assert rows["kill"]["n"] == rows["create .. first command"]["n"] + rows["fork 2 .. all answer"]["answered"]
    behind = [point[2] for point in report["plots"][1]["lines"][0]["points"]]
    assert sum(behind) == rows["command round trip"]["n"]
    text = page.read_text()
    assert text.count("<svg") == 5 and "<script" not in text and "http" not in text
    kept.write_text(json.dumps(report))
    server.cli("bench", "render", kept, "--html", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text
    assert "| command round trip |" in server.cli("bench", "render", kept, "--markdown").stdout


def test_density_finds_the_processes(server):
    rows, _ = bench(server, "density", "-n", 2, "--seconds", 1)
    assert rows["all sandboxes"]["n"] == 2 and rows["aenv-server"]["n"] == rows["aenv-blockd"]["n"] == 1
    assert 0 < rows["each further sandbox"]["ratio"] < 1
    assert rows["all sandboxes"]["pssMib"] > rows["the first sandbox, alone"]["pssMib"]


def test_the_ratios_to_the_floor_of_the_same_machine(server):
    before = things(server)
    # What `aenv-server floor` has to know of the server, and a network of its own.
    env = {"AENV_HOME_PATH": str(server.home), "AENV_NETWORK_INTERNAL_VETH_CIDR": "10.217.0.0/16"}
    done = server.cli("bench", "verbs", "-n", 7, "--children", 4, env=env)
    report = json.loads(done.stdout)
    assert report["floor"]["http"]["n"] >= 7 and all(row["ratio"] > 0 for row in report["results"])
    assert things(server) <= before
    assert not list(server.home.glob("floor-*"))
    rows = {row["operation"]: row for row in report["results"]}
    found = {operation: rows[operation]["ratio"] for operation in limits()}
    assert len(found) == 5
    above = {operation: ratio for operation, ratio in found.items() if ratio > limits()[operation]}
    assert not above, f"{above} of {found}, which may be {limits()}"


def test_an_interrupted_run_leaves_nothing(server):
    before = things(server)
    words = ["bench", "mixed", "-n", "2", "--seconds", "600", "--server-binary", "/bin/false"]
    process = subprocess.Popen(
        [BIN / "aenv", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **server.env}
    )
    try:
        wait_for("a sandbox of the bench", lambda: things(server) - before)
    finally:
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and output == b""
    assert things(server) <= before


def test_an_operation_that_fails_is_counted(server):
    done = server.cli("bench", "burst", "-n", 2, "--template", "no-such", "--server-binary", "/bin/false", check=False)
    rows = {row["operation"]: row for row in json.loads(done.stdout)["results"]}
    assert done.returncode == 1 and rows["create: 404 template_not_found"]["failed"] == 2
