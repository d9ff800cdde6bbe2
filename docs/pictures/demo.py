"""Draw docs/demo.svg: the demo's run as a terminal shows it, for real."""

import fcntl
import io
import os
import pty
import re
import runpy
import shutil
import struct
import subprocess
import sys
import termios
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
DEMO = runpy.run_path(str(ROOT / "examples" / "demo.py"))
COLUMNS, ROWS = 100, 40
# Of many such lines one after the other (epochs, a traceback's frames) the middle is left out.
MANY = re.compile(r"epoch \d+  step |\[\d\]   ")
ENDS = 2  # first and last lines that are shown


def run(arguments):
    """What ``paceline`` writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [Path(sys.executable).parent / "paceline", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 1 << 16):
            written += piece
    except OSError:  # Linux says so when the last writer has gone
        pass
    if process.wait():
        sys.exit(f"the demo failed:\n{written.decode(errors='replace')}")
    return written.decode()


def settled(written):
    """The lines that stay: what was erased or written over is gone."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        kept = line.rpartition("\x1b[2K")[2].rstrip("\r").rpartition("\r")[2]
        if kept or not line:
            lines.append(kept)
    return lines


def shortened(lines):
    """The lines, with an ellipsis for the middle of each long block of MANY."""
    short = []
    for kind, block in groupby(lines, lambda line: MANY.match(line) and line[0]):
        block = list(block)
        if kind and len(block) > 2 * ENDS + 1:
            block[ENDS:-ENDS] = ["  ..."]
        short += block
    return short


def main():
    shutil.rmtree(ROOT / DEMO["CHECKPOINTS"], ignore_errors=True)
    written = run(DEMO["RUN"].split()).replace(f"{ROOT}/", "")
    lines = shortened(settled(written))
    text = "\n".join([f"\x1b[1m{DEMO['SHOWN']}\x1b[0m", *lines]).rstrip()
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="paceline run -n 2 ...", unique_id="demo")
    for local in (str(ROOT), str(Path.home()), os.uname().nodename):
        if local in svg:
            sys.exit(f"{local} stands in the picture")
    target = ROOT / "docs" / "demo.svg"
    target.write_text(svg, encoding="utf-8")
    print(f"{target.relative_to(ROOT)}: {len(lines)} lines")


if __name__ == "__main__":
    main()
