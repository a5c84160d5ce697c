"""The code interpreter's template, with the published client, which asks for `code-interpreter-v1` by itself.

What its service does in every case is tested without VMs, in tests/code_interpreter.
"""

import os
import subprocess
from pathlib import Path

import pytest
from e2b import NotFoundException, TimeoutException
from e2b_code_interpreter import Sandbox

from conftest import LONG, ROOT

IMAGE = Path(os.environ.get("AENV_INTERPRETER_IMAGE", ROOT / ".build" / "code-interpreter-image"))
# One process that asks again and again: under emulation a start of curl takes a second from the service that it waits for.
HEALTH = "curl -fs --retry 1400 --retry-delay 1 --retry-connrefused http://127.0.0.1:49999/health"
CLIENT = "code-interpreter"


@pytest.fixture(scope="module")
def template(server):
    assert IMAGE.exists(), f"{IMAGE} does not exist: run `make code-interpreter` first"
    server.cli(
        "pull", f"oci:{IMAGE}", "--name", "code-interpreter-v1", "--cpu", "2", "--memory", "1024",
        "--start-cmd", "sudo code-interpreter", "--ready-cmd", HEALTH,
    )
    yield
    assert server.api("DELETE", "/templates/code-interpreter-v1")[0] == 204


@pytest.fixture(scope="module")
def interpreter(template):
    made = Sandbox.create(envs={"COLOUR": "blue"}, timeout=LONG)
    yield made
    made.kill()


@pytest.mark.compat(CLIENT, "Sandbox.create", "run_code")
def test_code_and_its_results(interpreter):
    assert interpreter.run_code("1+1").text == "2"
    seen = []
    done = interpreter.run_code("x = 20\nprint('Hello from e2b')\nx + 1", on_stdout=seen.append, on_result=seen.append)
    assert (done.text, done.logs.stdout, done.execution_count) == ("21", ["Hello from e2b\n"], 2)
    assert len(seen) == 2
    assert interpreter.run_code("x").text == "20"
    assert interpreter.run_code("import os; os.getcwd(), os.environ['COLOUR']").text == "('/home/user', 'blue')"
    assert interpreter.run_code("os.environ['COLOUR']", envs={"COLOUR": "red"}).text == "red"
    assert interpreter.run_code("os.environ['COLOUR']").text == "blue"
    failed = interpreter.run_code("not_there").error
    assert (failed.name, failed.value) == ("NameError", "name 'not_there' is not defined")
    assert "not_there" in failed.traceback


@pytest.mark.compat(CLIENT, "Result.png", "Result.json")
def test_an_image(interpreter):
    # matplotlib and pandas take minutes to import where the CPU is emulated; tests/code_interpreter has them.
    done = interpreter.run_code("from PIL import Image\ndisplay({'a': [1]})\nImage.new('RGB', (2, 2))", timeout=120)
    assert done.error is None
    assert done.results[0].json == {"a": [1]}
    assert done.results[1].png.startswith("iVBOR")


@pytest.mark.compat(CLIENT, "run_code(language)", "list_code_contexts")
def test_javascript_and_typescript(interpreter):
    assert {"python", "javascript"} <= {context.language for context in interpreter.list_code_contexts()}
    assert interpreter.run_code("const x = 6; x * 7", language="js").text == "42"
    assert interpreter.run_code("process.env.COLOUR", language="javascript").text == "blue"
    typed = interpreter.run_code("const message: string = process.cwd(); console.log(message)", language="ts", timeout=60)
    assert typed.logs.stdout == ["/home/user\n"]


@pytest.mark.compat(CLIENT, "create_code_context", "restart_code_context", "remove_code_context", "run_code(context)")
def test_contexts(interpreter):
    # As in E2B, code runs as root.
    context = interpreter.create_code_context(cwd="/root", language="javascript")
    assert interpreter.list_code_contexts()[-1].id == context.id and context.cwd == "/root"
    assert interpreter.run_code("globalThis.kept = process.cwd()", context=context).text == "/root"
    interpreter.restart_code_context(context)
    assert interpreter.run_code("typeof kept", context=context).text == "undefined"
    interpreter.remove_code_context(context)
    with pytest.raises(NotFoundException, match="not found"):
        interpreter.run_code("1", context=context)


@pytest.mark.compat(CLIENT, "run_code(timeout)")
def test_a_timeout_interrupts_the_code(interpreter):
    interpreter.run_code("kept = 'kept'")
    with pytest.raises(TimeoutException):
        interpreter.run_code("import time; time.sleep(300)", timeout=2)
    assert interpreter.run_code("kept", timeout=60).text == "kept"


@pytest.mark.compat(CLIENT, "Sandbox.pause", "Sandbox.connect", "Sandbox.fork")
def test_state_over_pause_resume_and_fork(interpreter):
    interpreter.run_code("state = [1, 2, 3]")
    interpreter.run_code("globalThis.state = 'of node'", language="js")
    interpreter.pause()
    resumed = Sandbox.connect(interpreter.sandbox_id, timeout=LONG)
    assert resumed.run_code("state").text == "[1, 2, 3]"
    (child,) = resumed.fork(count=1, timeout=LONG)
    child.run_code("state.append(4)")
    assert child.run_code("state").text == "[1, 2, 3, 4]"
    assert child.run_code("state", language="js").text == "of node"
    assert child.kill()
    assert resumed.run_code("state").text == "[1, 2, 3]"


@pytest.mark.compat(
    "code-interpreter-typescript", "Sandbox.create", "runCode", "runCode(language)", "runCode(context)", "runCode(timeoutMs)",
    "createCodeContext", "listCodeContexts", "restartCodeContext", "removeCodeContext",
)
def test_the_client_for_typescript(server, template):
    script = Path(__file__).parent / "typescript" / "interpreter.mjs"
    env = {**os.environ, **server.env}
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is well"
