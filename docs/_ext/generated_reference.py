"""Write the parts of the reference that the code defines, before Sphinx reads the pages.

The files are `docs/reference/generated/*.md`; pages of the reference include them. The texts are
those of `--help` and of the tables in the code, so the reference cannot differ from either.
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from sphinx.application import Sphinx
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from paceline.analyze.diagnosis.table import CAUSES, INDICATORS
from paceline.analyze.verification.find import MISTAKES
from paceline.analyze.verification.mistakes import MEANT
from paceline.cli import app as cli
from paceline.knobs.registry import KNOBS, Knob
from paceline.report.definitions import DEFINITIONS, GLOSSARY

OTHER_OPTIONS = "Options"  # heading of options that belong to no group
DEFAULT = re.compile(r"Default: (.+?)\.(?:\s+|$)")  # in the help of an option
# Keys of DEFINITIONS that the tables and lists of measures.md define, with more detail.
DEFINED_IN_MEASURES = {
    *("input", "checkpoint", "validation", "other", "background", "hidden"),
    *("useful share", "parallel", "communication", "serialisation", "transfer efficiency"),
    *("no checkpoint", "no validation", "no input", "no other"),
    *("scaling efficiency", "computation scalability", "global efficiency"),
    *("step time", "outlier", "waited for", "did longer", "count", "bytes", "FLOPs", "traffic"),
    *("sharded block", "late"),
    *("samples/s", "start-up", "recording cost", "clock residual", "confidence", "noise"),
}
MAX_EXAMPLE_LENGTH = 92  # that fits into a code block of the site
MAX_DEFAULT_LENGTH = 100  # of a default in its column; a longer one stays in the help


def commands() -> str:
    """Return a section for each command: usage, description, options by group, examples."""
    group = typer.main.get_command(cli)
    assert isinstance(group, TyperGroup)
    return "\n".join(
        line
        for name, command in group.commands.items()
        if not command.hidden
        for line in _command(f"paceline {name}", command)
    )


def _command(name: str, command: TyperCommand) -> Iterable[str]:
    context = command.context_class(command, info_name=name)
    yield f"## {name}\n"
    yield f"```text\n{' '.join([name, '[OPTIONS]', *_arguments(command)])}\n```\n"
    yield f"{_markdown(inspect.cleandoc(command.help or ''))}\n"
    if isinstance(command, TyperGroup):
        for inner, other in command.commands.items():
            yield from (
                line.replace("## ", "### ", 1) for line in _command(f"{name} {inner}", other)
            )
        return
    panels: dict[str, list[TyperOption | TyperArgument]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None)
            panels.setdefault(panel or _kind(parameter), []).append(parameter)
    for panel, parameters in panels.items():
        kind = "argument" if isinstance(parameters[0], TyperArgument) else "option"
        yield from _table(
            panel, (kind, "default", "meaning"), [_row(one, context) for one in parameters]
        )
    if command.epilog:
        examples = [_narrow(line) for line in command.epilog.split("\n\n")[1:]]
        yield "\n".join(["```text", *examples, "```\n"])


def _narrow(line: str) -> str:
    """Return an example with its meaning, without the padding between if the line is too wide."""
    return line if len(line) <= MAX_EXAMPLE_LENGTH else re.sub(r"(?<=\S) {3,}(?=\S)", "  ", line)


def _arguments(command: TyperCommand) -> Iterable[str]:
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            word = (parameter.metavar or parameter.name or "").upper()
            word += "..." if parameter.nargs == -1 else ""
            yield word if parameter.required else f"[{word}]"


def _kind(parameter: TyperOption | TyperArgument) -> str:
    return "Arguments" if isinstance(parameter, TyperArgument) else OTHER_OPTIONS


def _row(parameter: TyperOption | TyperArgument, context: Any) -> tuple[str, str, str]:
    if isinstance(parameter, TyperArgument):
        return (f"`{(parameter.metavar or parameter.name or '').upper()}`", *_default(parameter))
    names = [*parameter.opts, *parameter.secondary_opts]
    value = "" if parameter.is_flag else f" {parameter.metavar or _type(parameter, context)}"
    default, meaning = _default(parameter)
    return ", ".join(f"`{name}{value}`" for name in sorted(names, key=len)), default, meaning


def _default(parameter: TyperOption | TyperArgument) -> tuple[str, str]:
    """Return the default of an option as Markdown, and its help without the default.

    A default that depends on the machine or the job is a sentence of the help ("Default: ...").
    """
    meaning = _help(parameter)
    if parameter.default not in (None, [], ()) and not getattr(parameter, "is_flag", False):
        return f"`{parameter.default}`", meaning
    found = DEFAULT.search(meaning)
    if found is None:
        return "", meaning
    if len(found[1]) > MAX_DEFAULT_LENGTH:
        return re.split(r"[,;]", found[1])[0], meaning
    return found[1], (meaning[: found.start()] + meaning[found.end() :]).strip()


def _type(option: TyperOption, context: Any) -> str:
    return (
        str(option.display_type(context))
        .strip("<>")
        .removeprefix("list[")
        .removesuffix("]")
        .upper()
    )


def _help(parameter: Any) -> str:
    return _markdown(" ".join((parameter.help or "").split()))


def _markdown(text: str) -> str:
    """Return a help text as Markdown: options and names in capitals as code, no other markup."""
    text = re.sub(r"([*_`\[\]])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", text)


def knobs() -> str:
    """Return a table of all knobs: effect and cost, values, and equivalent edit."""
    rows = [
        (
            f"`{name}`",
            _effect(knob),
            str(knob.value) if knob.hook and knob.value is not None else "edit of the script",
            knob.edit.replace("{value}", "N"),
        )
        for name, knob in KNOBS.items()
    ]
    index = "```{index} " + ", ".join(f"!{name}" for name in KNOBS) + "\n```\n\n"
    heads = ("knob", "effect", "values", "edit of the script")
    return index + "\n".join(_table("", heads, rows))


def _effect(knob: Knob) -> str:
    """Return the effect of a knob, then its cost."""
    parts = [knob.does, f"cost: {knob.costs}" if knob.costs else ""]
    parts.append("changes the numbers" if knob.numbers else "")
    return "; ".join(part.rstrip(".") for part in parts if part)


def remedies() -> str:
    """Return a table of the knobs and edits that address each cause."""
    answers: dict[str, list[str]] = {}
    for name, knob in KNOBS.items():
        for cause in knob.answers:
            answers.setdefault(cause, []).append(f"`{name}`" if knob.hook else knob.does)
    rows = [(f"`{cause}`", "; ".join(names)) for cause, names in sorted(answers.items())]
    return "\n".join(_table("", ("cause", "remedies"), rows))


def causes(group: str) -> str:
    """Return a table of the causes of lost time of one group."""
    rows = [(f"`{one.id}`", one.named_if) for one in CAUSES.values() if one.group == group]
    return "\n".join(_table("", ("id", "named if"), rows))


def mistakes() -> str:
    """Return a table of the mistakes that ``paceline verify`` names."""
    rows = [
        (
            f"`{one.id}`",
            one.title,
            one.measured,
            one.remedy,
            ", ".join(f"`{name}`" for name in one.explains),
        )
        for one in MISTAKES.values()
    ]
    heads = ("id", "mistake", "measured", "remedy", "explains")
    return "\n".join(_table("", heads, rows))


def meant() -> str:
    """Return a table of the differences that ``paceline verify --accept`` accepts."""
    rows = [
        (f"`{one.name}`", one.clause, "0" if one.is_usual else "1 unless accepted")
        for one in MEANT.values()
    ]
    return "\n".join(_table("", ("name", "difference", "exit code if confirmed"), rows))


def definitions() -> str:
    """Return the definitions of the report page that no other part of the reference has."""
    elsewhere = {*GLOSSARY.values(), *DEFINED_IN_MEASURES}
    return "\n".join(
        f"{_label(key)}\n: {text}\n" for key, text in DEFINITIONS.items() if key not in elsewhere
    )


def glossary() -> dict[str, str]:
    """Return the definitions that the glossary shares with the report page, by substitution."""
    return {re.sub(r"\W+", "_", term).lower(): DEFINITIONS[key] for term, key in GLOSSARY.items()}


def _label(key: str) -> str:
    """Return a key of DEFINITIONS as the page shows it."""
    cause = key.removeprefix("held by ")
    if cause != key:
        return f"{INDICATORS[cause].title} (in a diagnosis)"
    return {"step_ms": "step (ms)"}.get(key, key)


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterable[str]:
    if title:
        yield f"**{title}**\n"
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def write_all(app: Sphinx) -> None:
    """Write every generated part whose text has changed."""
    folder = Path(app.srcdir, "reference", "generated")
    folder.mkdir(exist_ok=True)
    parts = (commands, knobs, remedies, mistakes, meant, definitions)
    texts = {part.__name__: part() for part in parts}
    groups = dict.fromkeys(one.group for one in CAUSES.values())
    texts |= {f"causes_{group}": causes(group) for group in groups}
    for name, text in texts.items():
        path = folder / f"{name}.md"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_all)
    return {"parallel_read_safe": True}
