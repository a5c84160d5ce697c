"""Executions: what stands on the lines, and in which order."""

import os
import signal
import threading
import time

import pytest

from conftest import wait_for


def test_a_result_and_its_count(service):
    first = service.run("value = 6 * 7; value")
    assert [line["type"] for line in first.lines] == ["number_of_executions", "result", "end_of_execution"]
    assert first.results == [{"type": "result", "is_main_result": True, "text": "42"}]
    second = service.run("value += 1; value")
    assert second.text == "43"
    assert second.lines[0]["execution_count"] == first.lines[0]["execution_count"] + 1
    assert service.run("nothing = 1").results == []
    assert service.run("").results == []


def test_streams_keep_their_order_and_time(service):
    found = service.run("import sys\nfor n in range(3):\n print('out', n)\n print('error', n, file=sys.stderr)")
    lines = [(line["type"], line["text"]) for line in found.of("stdout", "stderr")]
    assert lines == [(kind, f"{word} {n}\n") for n in range(3) for kind, word in (("stdout", "out"), ("stderr", "error"))]
    times = [line["timestamp"] for line in found.of("stdout", "stderr")]
    assert times == sorted(times) and times[0].startswith("20")
    assert [line["text"] for line in service.run("print('Hello from e2b')").of("stdout")] == ["Hello from e2b\n"]


def test_output_arrives_while_the_code_runs(service, tmp_path):
    gate = tmp_path / "gate"
    code = f"import os, time\nprint('before', flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\nprint('after')"
    connection, answer = service.open("POST", "/execute", {"code": code})
    lines = service.lines(answer)
    assert next(line for line in lines if line["type"] == "stdout")["text"] == "before\n"
    gate.touch()
    assert [line["text"] for line in lines if line["type"] == "stdout"] == ["after\n"]
    connection.close()


def test_silence_is_filled(service):
    assert {"type": "keepalive"} in service.run("import time; time.sleep(8)").lines


def test_all_of_a_flood(service):
    shown = service.run("from IPython.display import display\nfor n in range(2500): display(n)")
    assert [one["text"] for one in shown.results] == [str(n) for n in range(2500)]
    printed = service.run("for n in range(200_000): print(n)").stdout()
    assert printed == "".join(f"{n}\n" for n in range(200_000))


def test_text_of_every_kind(service):
    assert service.run("'Grüße 😀'").text == "Grüße 😀"
    assert service.run('"it\'s"').text == "it's"
    assert service.run("print('Grüße 😀 \\x00')").stdout() == "Grüße 😀 \x00\n"
    assert len(service.run("'x' * 3_000_000").text) == 3_000_000


def test_mime_bundles(service):
    mimes = {
        "html": "text/html", "markdown": "text/markdown", "svg": "image/svg+xml", "png": "image/png", "jpeg": "image/jpeg",
        "pdf": "application/pdf", "latex": "text/latex", "javascript": "application/javascript", "text": "text/plain",
    }
    bundle = {mime: name for name, mime in mimes.items()}
    (found,) = service.run(f"display({ {**bundle, 'application/x-mine': 'more'} !r}, raw=True)").results
    assert found == {"type": "result", "is_main_result": False, **{name: name for name in mimes}, "extra": {"application/x-mine": "more"}}
    several = service.run("display(1); display(2); 3").results
    assert [(one["text"], one["is_main_result"]) for one in several] == [("1", False), ("2", False), ("3", True)]


def test_json(service):
    (found,) = service.run("{'a': [1, 2.5, None], 'b': {'c': 'd'}}").results
    assert found["json"] == {"a": [1, 2.5, None], "b": {"c": "d"}}
    assert service.run("[1, 2]").results[0]["json"] == [1, 2]
    assert "json" not in service.run("{'a': object()}").results[0]
    assert "json" not in service.run("[float('nan')]").results[0]
    assert service.run("import numpy; [numpy.int64(1), numpy.float32(0.5)]").results[0]["json"] == [1, 0.5]


def test_a_table(service):
    code = "import pandas\npandas.DataFrame({'a': [1, 2], 'b': [0.5, float('nan')], 'when': pandas.to_datetime(['2026-01-02', None])})"
    (found,) = service.run(code).results
    assert found["data"] == {"a": [1, 2], "b": [0.5, None], "when": ["2026-01-02T00:00:00", None]}
    assert "<table" in found["html"] and "0.5" in found["text"]


def test_a_figure(service):
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3], [4, 5, 6], label='line')\nplt.title('A title')\nplt.show()"
    (found,) = service.run(code).results
    assert found["png"].startswith("iVBOR") and not found["is_main_result"]
    chart = found["chart"]
    assert (chart["type"], chart["title"]) == ("line", "A title")
    assert chart["elements"] == [{"label": "line", "points": [[1, 4], [2, 5], [3, 6]]}]
    (found,) = service.run("figure, axes = plt.subplots(1, 2)\naxes[0].bar(['a'], [1]); axes[1].pie([1, 2])\nplt.show()").results
    assert [one["type"] for one in found["chart"]["elements"]] == ["bar", "pie"]


def test_an_image(service):
    (found,) = service.run("from PIL import Image\nImage.new('RGB', (2, 2))").results
    assert found["png"].startswith("iVBOR") and found["is_main_result"]


def test_errors(service):
    found = service.run("print('before')\nnot_there")
    assert found.stdout() == "before\n"
    assert (found.error["name"], found.error["value"]) == ("NameError", "name 'not_there' is not defined")
    assert "not_there" in found.error["traceback"] and "\x1b" not in found.error["traceback"]
    assert service.run("x = = 1").error["name"] == "SyntaxError"
    assert service.run("raise SystemExit(3)").error["name"] == "SystemExit"
    # Input is not there to be waited for.
    assert service.run("input()").error["name"] == "StdinNotImplementedError"
    assert service.run("1").text == "1"


def test_indented_code_and_magics(service, home):
    assert service.run("\n    y = 1\n    y + 1\n    ").text == "2"
    assert service.run("!pwd").stdout().strip() == str(home)
    assert service.run("import asyncio\nawait asyncio.sleep(0, 'awaited')").text == "awaited"


def test_environment(service, envd):
    get = "import os; os.environ.get('{}')"
    assert service.run(get.format("OF_SANDBOX")).text == "all"
    assert service.run(get.format("OF_SANDBOX"), token="another").results == []
    assert service.run(get.format("OF_CALL"), env={"OF_CALL": "it's \"one\"\n$HOME"}).text == "it\\'s \"one\"\\n$HOME"
    assert service.run(get.format("OF_CALL")).results == []
    assert service.run(get.format("OF_SANDBOX"), env={"OF_SANDBOX": "mine"}).text == "mine"
    assert service.run(get.format("OF_SANDBOX")).text == "all"
    # What the sandbox is given later (a resume, a fork) is seen; what the code set itself stays.
    service.run("os.environ['OWN'] = 'set by code'; os.environ['PATH'] += ':/more'")
    envd.envs = {"OF_SANDBOX": "new"}
    try:
        assert service.run(get.format("OF_SANDBOX")).text == "new"
        assert service.run(get.format("OWN")).text == "set by code"
        assert service.run(get.format("PATH")).text.endswith(":/more")
    finally:
        envd.envs = {"OF_SANDBOX": "all"}


def test_executions_of_one_context_take_turns(service):
    found = []
    code = "started = time.time(); time.sleep(0.3); [started, time.time()]"
    service.run("import time")

    def run():
        found.append(service.run(code).results[0]["json"])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.sort()
    assert len(found) == 4
    assert all(before[1] <= after[0] for before, after in zip(found, found[1:]))


@pytest.mark.parametrize("code", ["import time; time.sleep(300)", "while True: pass", "!sleep 300"])
def test_a_client_that_goes_interrupts_its_code(service, code):
    service.run("kept = 'kept'")
    connection, answer = service.open("POST", "/execute", {"code": code})
    next(service.lines(answer))
    connection.sock.close() if connection.sock else answer.close()
    answer.close()
    began = time.monotonic()
    assert service.run("kept").text == "kept"
    assert time.monotonic() - began < 30


def test_code_that_heeds_no_interrupt_goes_on_until_a_restart(service, tmp_path):
    made, count = service.create()["id"], tmp_path / "count"
    heeds_not = f"except KeyboardInterrupt: open({str(count)!r}, 'a').write('x')"
    code = f"import time\nwhile True:\n try: print('in', flush=True); time.sleep(300)\n {heeds_not}"
    connection, answer = service.open("POST", "/execute", {"code": code, "context_id": made})
    next(line for line in service.lines(answer) if line["type"] == "stdout")
    answer.close()
    connection.close()
    # Interrupted twice, in case the first one came too early.
    wait_for("both interrupts", lambda: count.exists() and count.read_text() == "xx")
    assert service.call("POST", f"/contexts/{made}/restart")[0] == 200
    assert service.run("1 + 1", context=made).text == "2"
    service.remove(made)


def test_a_client_that_goes_while_it_waits_runs_nothing(service, tmp_path):
    made, gate, mark = service.create()["id"], tmp_path / "gate", tmp_path / "mark"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)"
    first, running = service.open("POST", "/execute", {"code": wait, "context_id": made})
    next(service.lines(running))
    second, waiting = service.open("POST", "/execute", {"code": f"open({str(mark)!r}, 'w')", "context_id": made})
    waiting.close()
    second.close()
    # Whatever the service answers now, it answers after it has seen that.
    assert service.call("GET", "/health")[0] == 200
    gate.touch()
    assert [line["type"] for line in service.lines(running) if line["type"] != "keepalive"] == ["end_of_execution"]
    assert service.run("1", context=made).text == "1"
    assert not mark.exists()
    first.close()
    service.remove(made)


def test_a_kernel_that_dies_while_it_runs(service):
    made = service.create()["id"]
    code = "import os, time; kept = 1; print(os.getpid()); time.sleep(300)"
    connection, answer = service.open("POST", "/execute", {"code": code, "context_id": made})
    lines = service.lines(answer)
    pid = int(next(line for line in lines if line["type"] == "stdout")["text"])
    os.kill(pid, signal.SIGKILL)
    assert [line["type"] for line in lines if line["type"] != "keepalive"] == ["error", "unexpected_end_of_execution", "end_of_execution"]
    connection.close()
    assert service.run("kept", context=made).error["name"] == "NameError"
    service.remove(made)


def test_a_kernel_that_dies_while_it_is_idle(service):
    made = service.create()["id"]
    pid = int(service.run("import os; kept = 1; os.getpid()", context=made).text)
    os.kill(pid, signal.SIGKILL)
    wait_for("the kernel's end", lambda: _state(pid) in ("Z", None))
    found = service.run("kept", context=made)
    assert found.error["name"] == "KernelDied" and "restarted" in found.error["value"]
    assert {"type": "unexpected_end_of_execution"} in found.lines
    assert service.run("kept", context=made).error["name"] == "NameError"
    service.remove(made)


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def test_wrong_requests(service):
    cobol = "Nothing runs the language 'cobol' here; there are: bash, javascript, python, typescript"
    for body, status, text in [
        ({"code": "1", "context_id": "a", "language": "python"}, 400, "Only one of context_id or language can be provided"),
        ({"code": "1", "context_id": "not-there"}, 404, "Context not-there not found"),
        ({"code": "1", "language": "cobol"}, 400, cobol),
        ({}, 400, "code is missing"),
        ({"code": 1}, 400, "code is no string"),
        ({"code": "1", "env_vars": {"A": 1}}, 400, "env_vars is no object of strings"),
        ([], 400, "The body is no JSON object"),
        (b"{", 400, "The body is no JSON"),
    ]:
        assert service.call("POST", "/execute", body) == (status, text)
    assert service.call("GET", "/nowhere")[0] == 404
    assert service.call("GET", "/execute")[0] == 405
