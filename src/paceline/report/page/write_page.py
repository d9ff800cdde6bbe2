"""A page as text, and as a file: one HTML document with everything inside."""

import base64
import hashlib
import itertools
import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...security.error_reason import reason_of
from ...security.outputs import write_output
from ...version import __version__
from ..numbers import amount, duration, figure, percent, size
from ..terminal.run_report import GOOD
from .definitions import DEFINITIONS

ASSETS = Path(__file__).parent / "assets"


def page(template: str, data: dict[str, Any], context: dict[str, Any]) -> str:
    """The document. data: what charts.js draws; context: what the template shows.

    Only the two scripts made here may run in it, by their hashes: whatever a record says of
    hosts and scripts is text.
    """
    plotly, charts = _plotly(), (ASSETS / "charts.js").read_text()
    numbers = itertools.count()
    last = [0]

    def number() -> int:
        last[0] = next(numbers)
        return last[0]

    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        number=number,
        same=lambda: last[0],
        definition=DEFINITIONS.__getitem__,
        percent=percent,
        bytes=size,
        duration=duration,
        amount=amount,
        figure_of=figure,
        good=GOOD,
    )
    return environment.get_template(template).render(
        **context,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup((ASSETS / "style.css").read_text()),
        plotly=Markup(plotly),
        charts=Markup(charts),
        hashes=Markup(" ".join(map(_hash, (plotly, charts)))),
        data=Markup(_embedded(data)),
    )


def save(text: str, path: Path) -> str:
    """Write the page, a file whole or not at all; returns what to tell the user.

    Raises:
        ValueError: It can't be written.
    """
    try:
        write_output(path, text)
    except OSError as error:
        raise ValueError(
            f"{path} can't be written: {reason_of(error)}. HINT: a file in a folder that can be "
            "written, on a file system with some MB of room"
        ) from None
    return f"{path}: {size(len(text.encode()))}. HINT: open it in any browser; it needs no network"


def _plotly() -> str:
    """plotly.js, without a word that would end the script it stands in."""
    text = files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    assert "</script" not in text.lower()
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """JSON that can't end its element, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
