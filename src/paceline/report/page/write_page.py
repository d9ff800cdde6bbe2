"""Render a page and save it: one self-contained HTML document."""

import base64
import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...security.files import error_reason
from ...security.outputs import write_output
from ...version import __version__
from ..definitions import DEFINITIONS
from ..document import PAGE, Document, parts_of
from ..numbers import counted, size

ASSETS = Path(__file__).parent / "assets"


def document_page(document: Document, data: dict[str, Any]) -> str:
    """Return the page of a document as HTML.

    ``data`` is the JSON that charts.js draws. The content security policy of the page allows only
    its two scripts, by their hashes: names of hosts and scripts in a record cannot run anything.
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
        counted=counted,
        parts_of=lambda text: parts_of(text, PAGE),
    )
    return environment.get_template("document.html").render(
        document=document,
        shown=document.parts(PAGE),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        style=Markup((ASSETS / "style.css").read_text()),
        plotly=Markup(plotly),
        charts=Markup(charts),
        hashes=Markup(" ".join(map(_hash, (plotly, charts)))),
        data=Markup(_embedded(data)),
    )


def save(text: str, path: Path) -> str:
    """Write the page and return a message for the user. An incomplete file is never left behind.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        write_output(path, text)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error_reason(error)}. HINT: name a file in a folder that "
            "you can write to, on a file system with 10 MB of free space"
        ) from None
    return f"{path}: {size(len(text.encode()))}. HINT: open it in any browser; it needs no network"


def _plotly() -> str:
    """Return the part of plotly.js that charts.js uses (built by tools/plotly_bundle)."""
    text = (ASSETS / "plotly.min.js").read_text(encoding="utf-8")
    assert "</script" not in text.lower()  # it would end the element that holds the script
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON in which no name can end the script element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
