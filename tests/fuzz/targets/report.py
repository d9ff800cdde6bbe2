"""Hostile texts in a record's header, lines and command: the page and the terminal output.

The input is JSON: a header with texts and figures of the work, and a list of lines. The steps and
waits of the record are those of a valid one.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from typing import Any

from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket

from paceline.analyze.figures.report import TABLES_DIFFER, analyse_with_window
from paceline.analyze.records.load_run import Run, command_words, read_lines
from paceline.analyze.records.read_record import parse_record
from paceline.record.ring.states import State
from paceline.report.console import PlainConsole
from paceline.report.page import write_page
from paceline.report.page.run_page import single
from paceline.report.run_comparison import comparison_charts, comparison_document
from paceline.report.terminal.run_report import panel

from .record import FOLDER, about, ring
from .record import seeds as records

# plotly.js has 1.2 MB and is the same in each page.
write_page._plotly = lambda: "plotly"  # type: ignore[assignment]


class Compiled(BytecodeCache):
    """Keep compiled templates in memory, because compiling takes longer than the rest."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self.known:
            bucket.bytecode_from_string(self.known[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.known[bucket.key] = bucket.bytecode_to_string()


write_page.Environment = partial(Environment, bytecode_cache=Compiled())  # type: ignore[misc,assignment]
SCRIPTS = 3  # the data, plotly.js, and the code that draws
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
LINES = FOLDER / "rank-0.lines"
EVENTS = [next(records())[1:][i * 1320 : (i + 1) * 1320] for i in range(2)]


class Tags(HTMLParser):
    """Count the tags of a page that could run code."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        assert tag not in ("img", "iframe", "object", "svg", "base", "form", "link")
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("href", "src") or str(value).startswith("#"), value


def seeds() -> Iterator[bytes]:
    work = {"step": 3, "seconds": 1.0, "flops": 1e9, "bytes": 1e8, "device": "cpu"}
    work |= {"precision": "float32", "ops": [["mm", 3, 1e9, 1e8, 0.1]], "uncounted": ["x::y"]}
    loader = {"seconds": 1.0, "busy_s": 0.5, "workers": 2, "processes": False, "left_out": 1}
    more = {"torch": "2.8", "cores": "ff", "threads": 2, "device": "cpu", "attempt": 1}
    groups = {"1": {"name": "[/b]<script>", "size": 2, "rank": 0}}
    line = {"number": 7, "file": "a.py", "line": 3, "function": "f", "code": "</script>\u001b[2J"}
    yield json.dumps(
        {**about(0, 2, 1), **more, "work": work, "loader": loader, "groups": groups}
        | {"lines": [line], "command": ["train.py", "]]>", 5]}
    ).encode()


def run(data: bytes) -> None:
    told = json.loads(data)
    if not isinstance(told, dict):
        return
    meta: dict[str, Any] = {**about(0, 2, 1), **told, "rank": 0, "size": 2}
    first = meta["groups"].get("1") if isinstance(meta["groups"], dict) else None
    if not isinstance(first, dict):
        return
    other = {**meta, "rank": 1, "groups": {"1": {**about(1, 2, 1)["groups"]["1"]}}}
    other["groups"]["1"]["name"] = first.get("name", "")
    records = [parse_record(ring(one, EVENTS[i])) for i, one in enumerate((meta, other))]
    events = records[0].events.copy()
    events["state"][1::4] = State.SAMPLE
    events["amount"][1::4] = 7
    lines = told.get("lines")
    texts = [json.dumps(one) for one in lines] if isinstance(lines, list) else []
    LINES.write_text("".join(f"{text}\n" for text in texts))
    records[0] = replace(records[0], events=events, lines=read_lines(LINES)[0])
    command = command_words(told.get("command"))
    examined = analyse_with_window(Run("fuzz", records, [], [], command))
    assert TABLES_DIFFER not in examined.report.doubts
    text = io.StringIO()
    PlainConsole(file=text, width=100).print(panel(examined.report, 100, full=True))
    assert not CONTROL.search(text.getvalue())
    pages = [single(examined)]
    if len(data) % 8 == 0:
        document = comparison_document([examined.report], [examined.report])
        charts = comparison_charts([examined, examined], ["before", "after"])
        pages.append(write_page.document_page(document, charts))
    for page in pages:
        page.encode()
        found = Tags()
        found.feed(page)
        assert found.scripts == SCRIPTS
