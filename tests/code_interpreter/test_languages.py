"""JavaScript, TypeScript and bash."""

import os
import signal
import time

import pytest


def test_javascript(service, home):
    assert service.run("const x = 1; x", language="js").text == "1"
    assert service.run("const x = 2; x", language="JavaScript").text == "2"
    assert service.run("process.cwd()", language="js").text == str(home)
    assert service.run("({a: [1]})", language="js").text == "{ a: [ 1 ] }"
    assert service.run("undefined", language="js").results == []
    assert service.run("await Promise.resolve('Grüße 😀')", language="js").text == "Grüße 😀"
    found = service.run("console.error('e'); console.log('o'); 'r'", language="js")
    assert [line["type"] for line in found.lines] == ["number_of_executions", "stderr", "stdout", "result", "end_of_execution"]
    rich = service.run("({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>bold</b>'})})", language="js")
    assert rich.results[0]["html"] == "<b>bold</b>"


def test_javascript_imports(service):
    code = """
    import { readFileSync as read } from 'fs'
    import path, { join } from 'node:path'
    import * as os from "os"; import 'node:url'; import{sep}from"path"
    console.log(typeof read, typeof join, typeof path.join, typeof os.EOL, sep, "import('x')", `import y from 'z'`)
    """
    assert service.run(code, language="js").stdout() == "function function function string / import('x') import y from 'z'\n"
    assert service.run("(await import('fs')).existsSync('/')", language="js").text == "true"
    assert service.run("require('fs').existsSync('/')", language="js").text == "true"
    assert "Cannot find package 'not-there'" in service.run("import x from 'not-there'", language="js").error["value"]


def test_javascript_errors(service):
    found = service.run("function f() {\n  notThere\n}\nf()", language="js").error
    assert (found["name"], found["value"]) == ("ReferenceError", "notThere is not defined")
    assert found["traceback"].splitlines()[1:] == ["    at f (<anonymous>:2:3)", "    at <anonymous>:4:1"]
    assert service.run("let y = ;", language="js").error["name"] == "SyntaxError"
    assert service.run("throw 'text'", language="js").error["value"] == "text"
    late = service.run("setTimeout(() => { throw new Error('late') }, 1); await new Promise((r) => setTimeout(r, 200))", language="js")
    assert "late" in late.of("stderr")[0]["text"] and not late.error
    assert service.run("1", language="js").text == "1"


def test_javascript_environment(service):
    assert service.run("process.env.OF_SANDBOX", language="js").text == "all"
    assert service.run("process.env.OF_CALL", language="js", env={"OF_CALL": "one"}).text == "one"
    assert service.run("process.env.OF_CALL ?? 'default'", language="js").text == "default"


@pytest.mark.parametrize("code", ["while (true) {}", "await new Promise((r) => setTimeout(r, 300_000))"])
def test_javascript_is_interrupted_and_keeps_its_state(service, code):
    service.run("globalThis.kept = 'kept'", language="js")
    connection, answer = service.open("POST", "/execute", {"code": code, "language": "js"})
    next(service.lines(answer))
    answer.close()
    connection.close()
    began = time.monotonic()
    assert service.run("kept", language="js").text == "kept"
    assert time.monotonic() - began < 30


def test_a_node_that_dies(service):
    made = service.create(language="javascript")["id"]
    found = service.run("console.log('last words'); process.exit(3)", context=made)
    assert found.stdout() == "last words\n"
    assert found.error["name"] == "KernelDied" and "exit status 3" in found.error["value"]
    pid = int(service.run("process.pid", context=made).text)
    os.kill(pid, signal.SIGKILL)
    assert service.run("1", context=made).error["name"] == "KernelDied"
    assert service.run("1", context=made).text == "1"
    assert service.call("POST", f"/contexts/{made}/restart") == (200, "null")
    assert service.run("2", context=made).text == "2"
    service.remove(made)


def test_typescript(service, home):
    code = "const message: string = 'Hello'; enum Size { Small = 1 }\nconsole.log(message, Size.Small)"
    assert service.run(code, language="ts").stdout() == "Hello 1\n"
    assert service.run("process.cwd()", language="ts").text == str(home)
    assert service.run("typeof message", language="ts").text == "string"
    assert service.run("typeof message", language="js").text == "undefined"
    assert service.run("let x: = 1", language="ts").error["name"] == "SyntaxError"
    assert "typescript" in [context["language"] for context in service.contexts()]


def test_bash(service, home):
    assert service.run("pwd", language="bash").stdout().strip() == str(home)
    service.run("kept='a b'", language="bash")
    assert service.run("echo \"$kept\" $OF_SANDBOX", language="bash").stdout() == "a b all\n"
    assert service.run("echo $OF_CALL", language="bash", env={"OF_CALL": "it's $HOME"}).stdout() == "it's $HOME\n"
    assert service.run("echo ${OF_CALL:-default}", language="bash").stdout() == "default\n"
    found = service.run("echo before; false", language="bash")
    assert (found.stdout(), found.error["value"]) == ("before\n", "1")


def test_bash_is_interrupted_and_keeps_its_state(service):
    service.run("kept=here", language="bash")
    connection, answer = service.open("POST", "/execute", {"code": "sleep 300", "language": "bash"})
    next(service.lines(answer))
    answer.close()
    connection.close()
    assert service.run("echo $kept", language="bash").stdout().strip() == "here"
