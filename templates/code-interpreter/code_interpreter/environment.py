"""Environment variables: those of the sandbox, those of one execution, and how a running kernel learns of them."""

import json
import logging
import os
import re
import shlex

from tornado.httpclient import AsyncHTTPClient, HTTPRequest

# The in-sandbox API on this machine: it knows the variables that the sandbox was created with.
ENVD = os.environ.get("CODE_INTERPRETER_ENVD", "http://127.0.0.1:49983")
ENVD_SECONDS = 5

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


async def of_sandbox(access_token):
    """The sandbox's variables; none when envd does not answer, or not to this token."""
    headers = {"X-Access-Token": access_token} if access_token else {}
    request = HTTPRequest(f"{ENVD}/envs", headers=headers, request_timeout=ENVD_SECONDS)
    try:
        answer = await AsyncHTTPClient().fetch(request)
        return {str(name): str(value) for name, value in json.loads(answer.body).items()}
    except Exception as error:  # Whatever is wrong with envd, code that needs no variables runs.
        logging.warning("the sandbox's variables are not known: %s", error)
        return {}


def changes(applied, wanted):
    """What makes `applied` to `wanted`: new values by name, None for a variable to remove."""
    changed = {name: value for name, value in wanted.items() if applied.get(name) != value}
    return changed | {name: None for name in applied if name not in wanted}


def python(changed):
    new = {name: value for name, value in changed.items() if value is not None}
    old = [name for name, value in changed.items() if value is None]
    # Leaves no name behind in the user's namespace.
    return f"__import__('os').environ.update({new!r}); [__import__('os').environ.pop(name, None) for name in {old!r}]"


def bash(changed):
    # A name that no shell can have is passed over, as a shell does with its own environment.
    names = {name: value for name, value in changed.items() if NAME.fullmatch(name)}
    return "\n".join(f"unset {n}" if v is None else f"export {n}={shlex.quote(v)}" for n, v in names.items())


def r(changed):
    # A JSON string is an R string, but for the escapes of surrogates, which are not made.
    quote = lambda text: json.dumps(text, ensure_ascii=False)
    return "\n".join(
        f"Sys.unsetenv({quote(n)})" if v is None else f"invisible(do.call(Sys.setenv, setNames(list({quote(v)}), {quote(n)})))"
        for n, v in changed.items()
    )


# By language, the code that changes variables of a kernel. Others get theirs when they start, and no more.
CODE = {"python": python, "bash": bash, "r": r}
