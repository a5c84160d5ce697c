"""The lines of an execution's stream."""

import json
import math

# Of a MIME bundle, what has a field of its own; anything else goes to `extra`.
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

KEEPALIVE = {"type": "keepalive"}
END = {"type": "end_of_execution"}
UNEXPECTED_END = {"type": "unexpected_end_of_execution"}


def count(number):
    return {"type": "number_of_executions", "execution_count": number}


def stream(name, text, timestamp):
    return {"type": name, "text": text, "timestamp": timestamp}


def result(bundle, is_main):
    event, extra = {"type": "result", "is_main_result": is_main}, {}
    for mime, data in bundle.items():
        if mime not in FIELDS:
            extra[mime] = data
        elif data is not None:
            event[FIELDS[mime]] = data
    if extra:
        event["extra"] = extra
    return event


def error(name, value, traceback=""):
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def line(event):
    """One line: in ASCII, for a client may decode each piece that arrives by itself, and without NaN, which is no JSON."""
    try:
        text = json.dumps(event, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(event), allow_nan=False)
    return text.encode() + b"\n"


def finite(value):
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value
