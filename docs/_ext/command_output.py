"""The directive `command`: a command of a page, and what it printed when it was last run.

    ```{command} report
    :expect: largest losses
    paceline report run/record
    ```

`docs/run_commands.py PAGE` runs all commands of a page in their order and stores what they print in
`docs/outputs/PAGE/NAME.txt`, which this directive shows. Options:

    :lines: 12        show the first lines only
    :expect: a | b    the output must contain these texts
    :status: 1        the exit code that is expected, if not 0
    :short: command   the command of a short walk (docs/run_commands.py --short)
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_BLOCK = re.compile(
    r"^```\{command\} (\S+)\n((?::\w+:[^\n]*\n)*)(.*?)^```$", re.MULTILINE | re.DOTALL
)
OUTPUTS = Path(__file__).parent.parent / "outputs"


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    name: str
    line: str
    expect: tuple[str, ...]
    status: int
    short: str


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page, in their order."""
    found = []
    for name, options, line in _BLOCK.findall(page.read_text()):
        given = dict(re.findall(r"^:(\w+): *(.*)$", options, re.MULTILINE))
        expect = tuple(text.strip() for text in given.get("expect", "").split("|"))
        status = int(given.get("status", 0))
        line = line.replace("\\\n", "").strip()
        found.append(Command(name, line, expect, status, given.get("short", line)))
    return found


def output_file(page: Path, name: str) -> Path:
    """Return the file with the output of a page's command."""
    return OUTPUTS / page.stem / f"{name}.txt"


class CommandDirective(SphinxDirective):
    """Show a command with its output."""

    has_content = True
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "lines": directives.positive_int,
        "expect": directives.unchanged,
        "status": directives.nonnegative_int,
        "short": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        file = output_file(Path(self.env.doc2path(self.env.docname)), self.arguments[0])
        self.env.note_dependency(str(file))
        command = "$ " + "\n".join(self.content)
        shown = [nodes.literal_block(command, command, language="console")]
        if not file.is_file():
            raise self.error(f"{file} is missing. HINT: docs/run_commands.py")
        lines = file.read_text().rstrip().splitlines()
        most = self.options.get("lines", len(lines))
        text = "\n".join([*lines[:most], *(["..."] if most < len(lines) else [])])
        if text:
            shown.append(nodes.literal_block(text, text, language="text"))
        return shown


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command", CommandDirective)
    return {"parallel_read_safe": True}
