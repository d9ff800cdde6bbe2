"""The directive `command`: a command of a page, and what it printed when it was last run.

    ```{command} report
    :expect: largest losses
    paceline report run/record
    ```

`docs/run_commands.py PAGE` runs all commands of a page in their order and stores what they print in
`docs/outputs/PAGE/NAME.txt`, which this directive shows. Options:

    :lines: 12        show the first lines only
    :expect: text     the output must contain the text
    :status: 1        the exit code that is expected, if not 0
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
    expect: str
    status: int


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page, in their order."""
    found = []
    for name, options, line in _BLOCK.findall(page.read_text()):
        said = dict(re.findall(r"^:(\w+): *(.*)$", options, re.MULTILINE))
        status = int(said.get("status", 0))
        found.append(Command(name, line.strip(), said.get("expect", ""), status))
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
    }

    def run(self) -> list[nodes.Node]:
        file = output_file(Path(self.env.doc2path(self.env.docname)), self.arguments[0])
        self.env.note_dependency(str(file))
        command = "\n".join(f"$ {line}" for line in self.content)
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
