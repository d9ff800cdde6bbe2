"""Run the commands of a page of the docs in an empty folder, and store what they print.

    .venv/bin/python docs/run_commands.py docs/getting-started.md            # renew docs/outputs
    .venv/bin/python docs/run_commands.py docs/getting-started.md --check    # run, change nothing
    .venv/bin/python docs/run_commands.py docs/getting-started.md --short    # the same in a minute

Commands run in a copy of `examples/`, one after the other, with the interpreter's folder first in
PATH. If a command ends with another exit code than expected, or its output lacks a text that the
page expects, the output is printed, and the exit code is 1. `--short` runs the command of `:short:`
where a command has one. A file that this command does not write, and that a later `cat FILE` shows,
is created from the stored output.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "_ext"))

from command_output import commands_of, output_file

TIMEOUT_S = 600  # of one command
PROGRESS = re.compile(r"^paceline: run \d+: .*\n", re.MULTILINE)  # lines that are left out
WIDTH = "90"  # columns of the outputs: those of a code block on the site


def run_page(page: Path, check: bool, short: bool) -> None:
    """Run all commands of ``page``; unless ``check`` or ``short``, store their outputs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tutorial"
        shutil.copytree(DOCS.parent / "examples", folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "COLUMNS": WIDTH, "NO_COLOR": "1"}
        for command in commands_of(page):
            line = command.short if short else command.line
            print(f"$ {line}", flush=True)
            shown = folder / line.removeprefix("cat ")
            if short and line.startswith("cat ") and not shown.exists():
                shown.write_text(output_file(page, command.name).read_text())
            start = time.monotonic()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
            output = done.stdout.replace(scratch, "~").replace(f"{DOCS.parent}/", "")
            output = PROGRESS.sub("", output)
            missing = [text for text in command.expect if text not in output]
            if done.returncode != command.status or missing:
                sys.exit(
                    f"{output}\nexit code {done.returncode}, expected {command.status};"
                    f" missing in the output: {missing}"
                )
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
            if not (check or short):
                file = output_file(page, command.name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(output)


def main() -> None:
    """Run the pages that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="do not change docs/outputs")
    parser.add_argument(
        "--short", action="store_true", help="commands of a short walk; implies --check"
    )
    arguments = parser.parse_args()
    for page in arguments.pages:
        run_page(page, arguments.check, arguments.short)


if __name__ == "__main__":
    main()
