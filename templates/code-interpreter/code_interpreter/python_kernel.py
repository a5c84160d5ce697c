"""The Python kernel: IPython's, with richer results and streams that keep their order."""

import json
import math
import sys

import zmq
from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode
from traitlets.config import Config

CONFIG = Config(
    InteractiveShell={"colors": "nocolor"},
    # Nobody looks for yesterday's cells here, and the file would be written at each.
    HistoryManager={"enabled": False},
    # Texts of results are whole.
    PlainTextFormatter={"max_seq_length": 0},
)


class App(IPKernelApp):
    def init_iopub(self, context):
        # Nothing of what a cell sends at once may be dropped.
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)


class DataFormatter(BaseFormatter):
    """Tables as columns of plain values."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)


class ChartFormatter(BaseFormatter):
    """Figures as the values that they show."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def __call__(self, shown):
        # Not by `for_type`: matplotlib's own setup takes figures out of every formatter that it finds.
        figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", ())
        return chart(shown) if isinstance(shown, figure) else super().__call__(shown)


def table(frame):
    return {str(name): [plain(value) for value in column] for name, column in frame.to_dict(orient="list").items()}


def plain(value):
    """A value of a table, in JSON's terms."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return plain(value.item())
    return str(value)


def chart(figure):
    try:
        from e2b_charts import chart_figure_to_chart

        found = chart_figure_to_chart(figure)
        return found and found.model_dump(mode="json")
    except Exception:  # A figure that cannot be read is still a picture.
        return None


def as_json(value):
    """Lists and dicts that JSON can hold, as they are."""

    def number(one):
        if hasattr(one, "tolist"):  # numpy's numbers and arrays
            return one.tolist()
        raise TypeError

    try:
        return json.loads(json.dumps(value, default=number, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def enrich(shell):
    formatters = shell.display_formatter.formatters
    for new in (DataFormatter, ChartFormatter):
        formatter = new(parent=shell.display_formatter)
        formatters[formatter.format_type] = formatter
    # By name: nothing is imported before the user imports it.
    formatters["e2b/data"].for_type_by_name("pandas.core.frame", "DataFrame", table)
    for kind in (dict, list):
        formatters["application/json"].for_type(kind, as_json)


def keep_order(first, second):
    """What is written to one stream goes out before what is written to the other afterwards."""
    last = [first]
    for stream, other in ((first, second), (second, first)):

        def write(text, stream=stream, other=other, write=stream.write):
            if last[0] is not stream:
                last[0] = stream
                other.flush()
            return write(text)

        stream.write = write


def warm_up():
    """Imports what most plots and tables need, and draws once, so that the first that a user draws does not wait for it."""
    try:
        import io

        import pandas  # noqa: F401
        from e2b_charts import chart_figure_to_chart  # noqa: F401
        from matplotlib.figure import Figure
        from matplotlib import pyplot  # noqa: F401
    except ImportError:
        return
    figure = Figure()
    figure.subplots().plot([1, 2])
    figure.savefig(io.BytesIO(), format="png")


def main():
    app = App.instance(config=CONFIG)
    app.initialize()
    enrich(app.shell)
    keep_order(sys.stdout, sys.stderr)
    app.start()
