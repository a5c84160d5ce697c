"""A pytest plugin: which calls of which published clients the tests have seen work.

A test says what it shows with `@pytest.mark.compat(client, call, ...)`; one that runs a script of a client in a process of
its own notes the calls that the script came to with the fixture `saw`. With `--compatibility FILE` the run leaves
`[{"client", "version", "call", "outcome", "tests"}]` there, which scripts/compatibility.py makes into a page.
"""

import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NOTES = pytest.StashKey[list]()
PACKAGES = json.loads((HERE / "e2e/typescript/package.json").read_text())["dependencies"]


def pinned(requirements, package):
    """The version of a package in a requirements file."""
    return re.search(rf"(?m)^{package}==(\S+)$", (HERE / requirements).read_text()).group(1)


def version(client):
    """The version that the tests install of this client."""
    match client:
        case "python":
            return pinned("requirements.txt", "e2b")
        case "python-v1-paths" | "python-1":
            return pinned(f"e2e/previous/{client}.txt", "e2b")
        case "code-interpreter":
            return pinned("e2e/code_interpreter/requirements.txt", "e2b-code-interpreter")
        case "typescript":
            return PACKAGES["e2b"]
        case "typescript-v1-paths" | "typescript-1":
            return PACKAGES[client.replace("typescript", "e2b")].rpartition("@")[2]
        case "code-interpreter-typescript":
            return PACKAGES["@e2b/code-interpreter"]
        case "cli":
            return PACKAGES["@e2b/cli"]
        case "http":
            return "1.1"
    raise ValueError(f"unknown client {client}")


def pytest_addoption(parser):
    parser.addoption("--compatibility", metavar="FILE", help="leave there which clients' calls were seen to work")


def pytest_configure(config):
    config.addinivalue_line("markers", "compat(client, *calls): the calls of a published client that this test shows")
    config.stash[NOTES] = []


@pytest.fixture
def saw(request):
    """`saw(client, call)`: this test came to the call, and what it gave was right."""
    seen = request.node.stash.setdefault(NOTES, [])
    return lambda client, call: seen.append((client, call))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and not report.skipped:
        calls = [(mark.args[0], name) for mark in item.iter_markers("compat") for name in mark.args[1:]]
        test = item.nodeid.split("[")[0]
        for client, name in calls + item.stash.get(NOTES, []):
            item.config.stash[NOTES].append((client, name, report.passed, test))
    return report


def pytest_sessionfinish(session):
    file = session.config.getoption("--compatibility")
    if not file:
        return
    found = {}
    for client, call, passed, test in session.config.stash[NOTES]:
        entry = found.setdefault((client, call), {"outcome": "works", "tests": set()})
        entry["tests"].add(test)
        if not passed:
            entry["outcome"] = "fails"
    rows = [
        {"client": client, "version": version(client), "call": call, "outcome": entry["outcome"], "tests": sorted(entry["tests"])}
        for (client, call), entry in sorted(found.items())
    ]
    Path(file).write_text(json.dumps(rows, indent=1) + "\n")
