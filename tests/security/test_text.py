"""Hostile texts do not reach a terminal as control sequences or a page as markup."""

import io
import json
import os
import time
from html.parser import HTMLParser

import pytest
import typer
from pages import before_and_after
from records import Rank, made
from typer.testing import CliRunner

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.live.live_view import view
from paceline.analyze.records.load_run import Run, load_run
from paceline.analyze.records.stacks import Frame, innermost_user_frame, main_thread_frames
from paceline.cli import app
from paceline.cli.common.base import exit_on_mistake
from paceline.knobs.settings import settings_for_script
from paceline.launch.monitor.failures import RankStatus, describe_failure
from paceline.launch.monitor.output import ERR, MAX_MESSAGE_BYTES, STATUS, RankOutput
from paceline.record.ring.launcher_messages import notify
from paceline.record.ring.states import State
from paceline.record.ring.tail import Tail
from paceline.report.console import PlainConsole
from paceline.report.page.run_page import single
from paceline.report.terminal import top
from paceline.security.files import InvalidFileError, UnsafeFileError
from paceline.security.text import for_terminal, printable

TITLE = "\x1b]0;owned\x07"  # sets a terminal's title
# Zero-width space, tag characters, word joiner, bidi override, filler, private use, unassigned.
HIDDEN = "\u200b\U000e0041\u2060\u202e\u3164\ue000\u0378\ufe0f"
HOSTILE = (
    f"a{HIDDEN}{TITLE}[/b][link=file:///x]:x:\x9b2J\r\n</script><script>alert(1)</script>'\"\u2028"
)


def clean(text):
    """Whether the text has no control or invisible characters except line ends and tabs."""
    bad = [c for c in text if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    return not bad and not set(HIDDEN) & set(text)


@pytest.fixture
def folder(tmp_path):
    """Create a record whose host, group, line, command and versions are hostile."""
    work = {"step": 3, "seconds": 1.0, "flops": 1e9, "bytes": 1e8, "device": HOSTILE}
    work |= {"precision": HOSTILE, "ops": [[HOSTILE, 3, 1e9, 1e8, 0.1]], "uncounted": [HOSTILE]}
    found = tmp_path / "run"
    found.mkdir()
    for i in range(2):
        groups = {HOSTILE: (2, i)}
        more = {"torch": HOSTILE, "device": HOSTILE, "run": HOSTILE, "work": work, "clock": "one"}
        rank = Rank(found, i, 2, host=HOSTILE, groups=groups, **more)
        rank.step(0, 10)
        for step in range(20):
            begin = 10 + step * 40
            rank.was(State.FORWARD, begin, begin + 10 + 10 * i)
            rank.was(State.SAMPLE, begin + 37, begin + 37, amount=7)
            rank.collective(begin + 20, begin + 20, begin + 35, amount=1 << 20, group=HOSTILE)
            rank.step(begin, begin + 40, samples=8, number=step + 1)
        line = {"number": 7, "file": HOSTILE, "line": 3, "function": HOSTILE, "code": HOSTILE}
        rank.path.with_suffix(".lines").write_text(json.dumps(line) + "\n")
    (found / "run.json").write_text(json.dumps({"command": [HOSTILE, 3]}))
    return found


@pytest.mark.parametrize("options", [[], ["--json"], ["--timeline", "trace.json"]])
def test_report_prints_no_control_characters(folder, options, monkeypatch):
    monkeypatch.chdir(folder.parent)
    done = CliRunner().invoke(app, ["report", str(folder), *options], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert clean(done.output)
    assert "x1b]0;owned" in done.output or options[:1] == ["--timeline"]


def test_comparison_prints_no_control_characters(folder):
    done = CliRunner().invoke(app, ["report", str(folder), str(folder)])
    assert done.exit_code == 0
    assert clean(done.output)


def test_live_view_prints_no_control_characters(folder):
    tails = [
        Tail(path.name, 1 << 40, "R", path.read_bytes()) for path in sorted(folder.glob("*.ring"))
    ]
    seen = view(tails, [HOSTILE, 3], silent=[HOSTILE])
    text = io.StringIO()
    PlainConsole(file=text, width=200).print(top.render(seen, 200))
    assert clean(text.getvalue())
    assert "owned" in text.getvalue()
    assert clean("".join([*seen.silent_hosts, *seen.command]))
    assert clean(top.hang_report(seen, {0: STACK}, set(), 60.0, [HOSTILE]))


@pytest.mark.parametrize("command", [None, 5, {"a": 1}, [{"a": [1]}], [["x"]]])
def test_invalid_job_command_is_converted_to_strings(folder, command):
    tails = [Tail("rank-0.ring", 1, "R", (folder / "rank-0.ring").read_bytes())]
    assert all(isinstance(word, str) for word in view(tails, command).command)


STACK = (
    f"Thread 0x0000000000000001 (most recent call first):\n"
    f'  File "/tmp/{TITLE}.py", line 99999999999999999999 in f{TITLE}\n'
)


def test_stack_is_printable_and_reads_only_regular_files(tmp_path):
    assert clean(str(innermost_user_frame(STACK)))
    os.mkfifo(tmp_path / "pipe.py")
    began = time.monotonic()
    for name in (str(tmp_path / "pipe.py"), "/dev/zero", "a\0b", str(tmp_path)):
        assert str(Frame(name, 1, "f")).endswith(":1 in f")
    assert time.monotonic() - began < 1
    (tmp_path / "good.py").write_text(f"x = 1  # {TITLE}\n")
    assert str(Frame(str(tmp_path / "good.py"), 1, "f")) == (
        "good.py:1 in f: x = 1  # \\x1b]0;owned\\x07"
    )
    assert main_thread_frames("Thread 0x1\n" + '  File "' * 200_000) == []


def test_last_output_lines_of_failed_rank_are_printable():
    dead = RankStatus(0, host=HOSTILE, exit_code=1, exception=f"ValueError: {HOSTILE}")
    text = describe_failure(dead, [f"line {HOSTILE}"], 3)
    assert clean(text)
    assert text.count("\n") == 4
    dead.take_message({"place": f"data 1, stage 0{HOSTILE}"}, float)
    placed = describe_failure(dead, [], 3)
    assert clean(placed)
    assert "rank 0 (data 1, stage 0" in placed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError(f"bad {TITLE}\n    more"), "bad \\x1b]0;owned\\x07\n    more"),
        (InvalidFileError(f"a\n{TITLE}", "is bad"), "a\\x0a\\x1b]0;owned\\x07: is bad"),
        (UnsafeFileError(22, "is a FIFO", f"b\n{TITLE}"), "b\\x0a\\x1b]0;owned\\x07: is a FIFO"),
        (PermissionError(13, "Permission denied", "c\udcff"), "c\\udcff: Permission denied"),
        (OSError("no number"), "no number"),
    ],
    ids=str,
)  # fmt: skip
def test_error_messages_are_printable(error, said, capsys):
    with pytest.raises(typer.Exit) as end, exit_on_mistake():
        raise error
    assert end.value.exit_code == 2
    assert capsys.readouterr().err == f"paceline: {said}\n"


def test_notify_keeps_only_own_color_codes(capsys):
    own = "\r\x1b[2K\x1b[1;31mred\x1b[0m\n"
    notify(f"{own}{TITLE}\x1b[2J\x9b31m\n")
    assert capsys.readouterr().err == f"{own}\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\n"
    assert for_terminal("\x1b[" + "1;" * 40 + "m").startswith("\\x1b")


def output(heard):
    out, err = io.BytesIO(), io.BytesIO()
    return RankOutput(2, out, err, lambda rank, message: heard.append((rank, message))), err


@pytest.mark.parametrize(
    "line",
    [
        b"5", b"[]", b"null", b'"say"', b'{"say": 5}', b'{"say": null}', b'{"exception": "x"}',
        b'{"exception": "x", "at": "now", "code": 1}', b'{"exception": "x", "at": NaN, "code": 1}',
        b'{"finished": "x"}', b'{"finished": 1e400}', b'{"left": -1}', b'{"left": [1]}',
        b'{"summary": {}}', b"[" * 5000, b"\xff", b"{", b"", b'{"at": 1}' * 2, b"9" * 5000,
    ],
    ids=lambda line: line[:30].decode(errors="replace"),
)  # fmt: skip
def test_invalid_lines_in_status_pipe_are_ignored(line):
    heard = []
    shown, err = output(heard)
    shown.take(0, STATUS, line + b"\n")
    shown.take(1, STATUS, b'{"finished": 0}\n{"say": "\\u001b[2Jhi\\n"}\n')
    shown.close()
    assert heard == [(1, {"finished": 0})]
    assert err.getvalue() == b"\\x1b[2Jhi\n"


def test_endless_line_in_status_pipe_is_dropped():
    heard = []
    shown, _ = output(heard)
    for _ in range(2 * MAX_MESSAGE_BYTES >> 24):
        shown.take(0, STATUS, bytes(1 << 24))
    assert len(shown._status[0]) <= MAX_MESSAGE_BYTES
    shown.take(0, STATUS, b'\n{"finished": 0}\n')
    shown.close()
    assert heard == [(0, {"finished": 0})]
    assert ERR == 2


def test_settings_file_notes_are_printable(tmp_path):
    path = tmp_path / "settings.toml"
    head = 'format = "paceline-settings"\nversion = 1\n[knobs]\n'
    path.write_text(head + '"\\u001b]0;x\\u0007" = "\\u001b[2J"\nthreads = 0xffffffffffffffffff\n')
    with pytest.raises(InvalidFileError, match="an integer that does not fit 64 bits"):
        settings_for_script(path, "train.py")
    path.write_text(head + '"\\u001b]0;x\\u0007" = "\\u001b[2J"\nexchange = [[1]]\n')
    knobs, notes = settings_for_script(path, "train.py")
    assert knobs == {}
    assert len(notes) == 2
    assert all(note.isprintable() for note in notes)


def test_bidirectional_text_marks_are_escaped():
    marks = "\u061c\u200e\u200f\u202a\u202e\u2066\u2069"
    assert printable(marks) == "".join(f"\\u{ord(mark):04x}" for mark in marks)


@pytest.mark.parametrize(
    "text",
    [
        "plain text, caf\u00e9, \u00a0\u3000 spaces",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, non-joiner
        "\u0915\u094d\u200d\u0937",  # Devanagari, joiner after a virama
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # emoji of a family
        "\u26a0\ufe0f \U0001f441\ufe0f\u200d\U0001f5e8\ufe0f",  # emoji with selectors
        "\u845b\U000e0100",  # variant of an ideograph
        "\u0600\u0661",  # Arabic number sign
    ],
)
def test_text_of_all_scripts_is_unchanged(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\u200bb", "a\\u200bb"),
        ("\U000e0041\U000e007f", "\\U000e0041\\U000e007f"),
        ("pass\u200dword", "pass\\u200dword"),
        ("\u00e9\u200d\u200d\u00e9", "\u00e9\\u200d\\u200d\u00e9"),
        ("\u26a0\ufe0f\ufe0e", "\u26a0\ufe0f\\ufe0e"),  # more of them hide data
        ("a\U000e0100", "a\\U000e0100"),
        ("\u00ad\ufeff\u3164\u2800", "\\u00ad\\ufeff\\u3164\\u2800".replace("u00", "x")),
        ("\ue000\U00100000\uffff\ud800", "\\ue000\\U00100000\\uffff\\ud800"),
        ("\u2028\u2029\x85", "\\u2028\\u2029\\x85"),
    ],
    ids=ascii,
)
def test_invisible_characters_are_escaped(text, said):
    assert printable(text) == said


class Page(HTMLParser):
    """Collect the scripts of a page, and everything that could load or run something."""

    def __init__(self):
        super().__init__()
        self.scripts, self.bad, self._inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append([dict(attrs).get("type"), ""])
        self.bad += [tag] if tag in ("img", "iframe", "object", "base", "form", "link") else []
        self.bad += [name for name, _ in attrs if name.startswith("on")]
        self.bad += [v for name, v in attrs if name in ("href", "src") and not v.startswith("#")]

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1][1] += data

    def handle_endtag(self, tag):
        self._inside = False


def test_page_contains_hostile_names_as_text(folder):
    examined = analyse_with_window(load_run(folder))
    for text in (single(examined), before_and_after(examined, examined)):
        text.encode()
        page = Page()
        page.feed(text)
        kinds = [kind for kind, _ in page.scripts]
        assert kinds == ["application/json", "text/plain", None]
        assert page.bad == []
        json.loads(page.scripts[0][1])
        assert "alert(1)" not in page.scripts[2][1]
        assert clean(text.replace(page.scripts[1][1], ""))


def test_names_with_rich_markup_are_printed_literally(tmp_path):
    folder = made(tmp_path / "run", host="[/b]:x:[bold]")
    done = CliRunner().invoke(app, ["report", str(folder)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    text = io.StringIO()
    PlainConsole(file=text, width=60).print("[/b]:smile:")
    assert text.getvalue() == "[/b]:smile:\n"
    assert isinstance(load_run(folder), Run)
