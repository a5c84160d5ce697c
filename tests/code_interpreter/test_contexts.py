"""Contexts: made, listed, restarted, removed; each with a state of its own."""

import threading


def test_the_first_ones(service, home):
    found = {context["language"]: context for context in service.contexts()}
    assert found["python"]["cwd"] == found["javascript"]["cwd"] == str(home)


def test_one_of_its_own(service, tmp_path):
    made = service.create(cwd=str(tmp_path), language="Python")
    assert made == {"id": made["id"], "language": "python", "cwd": str(tmp_path)}
    assert service.contexts()[-1] == made
    assert service.run("import os; os.getcwd()", context=made["id"]).text == str(tmp_path)
    service.run("mine = 1", context=made["id"])
    assert service.run("mine").error["name"] == "NameError"
    assert service.run("mine", context=made["id"]).text == "1"
    service.remove(made["id"])
    assert made not in service.contexts()
    assert service.call("POST", "/execute", {"code": "1", "context_id": made["id"]})[0] == 404


def test_several_at_once(service):
    made = [service.create()["id"] for _ in range(3)]
    found = {}

    def run(context, number):
        service.run(f"import time; n = {number}; time.sleep(0.2)", context=context)
        found[number] = service.run("n", context=context).text

    threads = [threading.Thread(target=run, args=pair) for pair in zip(made, range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "0", 1: "1", 2: "2"}
    for context in made:
        service.remove(context)


def test_a_restart(service):
    made = service.create()
    service.run("x = 1", context=made["id"])
    assert service.call("POST", f"/contexts/{made['id']}/restart") == (200, "null")
    found = service.run("x", context=made["id"])
    assert (found.error["name"], found.error["value"]) == ("NameError", "name 'x' is not defined")
    assert found.lines[0]["execution_count"] == 1
    assert made in service.contexts()
    service.remove(made["id"])


def test_a_restart_ends_what_runs(service):
    made = service.create()["id"]
    connection, answer = service.open("POST", "/execute", {"code": "import time; time.sleep(300)", "context_id": made})
    lines = service.lines(answer)
    next(lines)
    assert service.call("POST", f"/contexts/{made}/restart")[0] == 200
    rest = [line for line in lines if line["type"] != "keepalive"]
    assert [line["type"] for line in rest] == ["error", "unexpected_end_of_execution", "end_of_execution"]
    assert (rest[0]["name"], rest[0]["value"]) == ("ContextRestarting", "Context was restarted")
    connection.close()
    assert service.run("2", context=made).text == "2"
    service.remove(made)


def test_a_default_context_that_was_removed_comes_back(service):
    before = next(context["id"] for context in service.contexts() if context["language"] == "javascript")
    service.remove(before)
    assert service.run("1 + 1", language="javascript").text == "2"
    assert before not in [context["id"] for context in service.contexts()]


def test_wrong_requests(service):
    cobol = "Nothing runs the language 'cobol' here; there are: bash, javascript, python, typescript"
    for method, path, body, status, text in [
        ("POST", "/contexts/not-there/restart", None, 404, "Context not-there not found"),
        ("DELETE", "/contexts/not-there", None, 404, "Context not-there not found"),
        ("POST", "/contexts", {"cwd": "/no/such/folder"}, 400, "cwd '/no/such/folder' is no folder that can be entered"),
        ("POST", "/contexts", {"language": "cobol"}, 400, cobol),
        ("POST", "/contexts", {"cwd": 1}, 400, "cwd is no string"),
    ]:
        assert service.call(method, path, body) == (status, text)
    assert all(context["language"] != "cobol" for context in service.contexts())
