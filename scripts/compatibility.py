#!/usr/bin/env python3
"""Renders docs/compatibility.md from what a test run saw (tests/compatibility.py).

usage: scripts/compatibility.py NOTES.json PAGE.md [--check]

With --check nothing is written: exit code 1 when the page is not what the run saw.
"""

import difflib
import json
import sys
from pathlib import Path

CLIENTS = {
    "python": ("Python SDK", "`e2b` on PyPI, the current generation (v2 paths)"),
    "python-v1-paths": ("Python SDK, previous", "the last `e2b` on PyPI that creates and connects by the v1 paths"),
    "python-1": ("Python SDK 1.x", "`e2b` on PyPI, first generation: it knows only a domain, so a TLS front with a wildcard name is needed"),
    "typescript": ("TypeScript SDK", "`e2b` on npm, the current generation"),
    "typescript-v1-paths": ("TypeScript SDK, previous", "the last `e2b` on npm that creates and connects by the v1 paths"),
    "typescript-1": ("TypeScript SDK 1.x", "`e2b` on npm, first generation: as with Python, behind a TLS front"),
    "cli": ("Command", "`@e2b/cli` on npm"),
    "code-interpreter": ("Code interpreter for Python", "`e2b-code-interpreter` on PyPI"),
    "code-interpreter-typescript": ("Code interpreter for TypeScript", "`@e2b/code-interpreter` on npm"),
    "http": ("HTTP", "what no client shows by itself"),
}

HEAD = """\
# Compatibility

Which calls of the published E2B clients work against this server. `make test` writes down what it saw and fails when this page says
anything else; `make compatibility` writes the page anew from the last run. A call is listed when a test made it against real VMs and what
it gave was right; one that is not listed may work, but no test shows it.

"""


def render(rows):
    page = [HEAD]
    clients = [client for client in CLIENTS if any(row["client"] == client for row in rows)]
    page.append("| client | version | calls | what it is |\n|---|---|---|---|\n")
    for client in clients:
        mine = [row for row in rows if row["client"] == client]
        works = sum(row["outcome"] == "works" for row in mine)
        title, what = CLIENTS[client]
        page.append(f"| [{title}](#{anchor(title)}) | {mine[0]['version']} | {works} of {len(mine)} work | {what} |\n")
    for client in clients:
        title, _ = CLIENTS[client]
        page.append(f"\n## {title}\n\n| call | | shown by |\n|---|---|---|\n")
        for row in rows:
            if row["client"] == client:
                tests = ", ".join(f"`{test.removeprefix('e2e/')}`" for test in row["tests"])
                page.append(f"| `{row['call']}` | {row['outcome']} | {tests} |\n")
    return "".join(page)


def anchor(title):
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def main():
    notes, page = Path(sys.argv[1]), Path(sys.argv[2])
    rows = json.loads(notes.read_text())
    unknown = {row["client"] for row in rows} - set(CLIENTS)
    if unknown:
        sys.exit(f"compatibility: no title for {', '.join(sorted(unknown))}")
    wanted = render(rows)
    if "--check" not in sys.argv[3:]:
        page.write_text(wanted)
        return
    there = page.read_text() if page.exists() else ""
    if there != wanted:
        lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), str(page), "what the run saw", lineterm="")
        sys.exit("\n".join(["compatibility: the page is not what the run saw; `make compatibility` writes it", *lines]))


if __name__ == "__main__":
    main()
