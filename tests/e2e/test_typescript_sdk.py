"""The same script with the published TypeScript SDK, current and the last one that uses the first version's paths."""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typescript"
CALLS = [
    "Sandbox.create", "Sandbox.connect", "Sandbox.pause", "Sandbox.isRunning", "Sandbox.fork", "Sandbox.createSnapshot", "Sandbox.kill",
    "commands.run", "commands.list", "files.write", "files.read", "files.list",
]


@pytest.mark.parametrize("package", ["e2b", "e2b-v1-paths"])
def test_the_readme_script(server, saw, package):
    modules = Path(os.environ.get("AENV_NODE_MODULES", HERE / "node_modules"))
    assert (modules / package).exists(), f"{package} is not in {modules}: scripts/clients.sh installs it"
    done = subprocess.run(
        ["node", HERE / "script.mjs", package], capture_output=True, text=True, timeout=900,
        env={**os.environ, **server.env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is well"
    for call in CALLS:
        saw(package.replace("e2b", "typescript"), call)
