"""The class of all commands: help, an optional file after --json, old spellings of options; and
options that a command gets as one value.
"""

import dataclasses
import inspect
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ...security.outputs import write_output

STDOUT = Path("/dev/stdout")  # --json without a file


class Group(TyperGroup):
    """The group of all commands. Its help shows no type for flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _hide_flag_types(self.params)

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))


class Command(TyperCommand):
    """A command of Paceline.

    ``--json`` prints to standard output; ``--json=FILE`` and ``--json NAME.json`` write a file.

    Attributes:
        renamed: Old spellings of options, with the present ones. They are not shown in --help.
        translated: Options of other launchers with the equivalent one and its meaning. A line
            says so.
        answered: Options of torchrun that are not needed, with what to do instead.
    """

    renamed: ClassVar[dict[str, str]] = {}
    translated: ClassVar[dict[str, tuple[str, str]]] = {}
    answered: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = _in_whole_paragraphs(self.help or "")
        _hide_flag_types(self.params)

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line: SCRIPT and [ARGS], not {SCRIPT}."""
        return [
            re.sub(r"^\{(.*?)\}(\.\.\.)?$", _plain, word)
            for word in super().collect_usage_pieces(ctx)
        ]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args = self.present_spelling(args)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def present_spelling(self, words: list[str]) -> list[str]:
        """Return the arguments of the command with present spellings of its own options.

        Arguments of a script, which begin with the first positional one, stay as they are.
        """
        result: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            positional = not word.startswith("-") or word == "-"
            if word == "--" or (positional and not self._interspersed):
                return [*result, word, *rest]
            if name in self.answered:
                raise typer.BadParameter(
                    f"{name} is an option of torchrun. HINT: {self.answered[name]}"
                )
            if name in self.translated:
                option, meaning = self.translated[name]
                message = f"paceline: {name} is {option} of paceline {self.name}: {meaning}"
                typer.echo(message, err=True)
                name = option
            name = self.renamed.get(name, name)
            if name == "--json" and not equals:
                is_file = bool(rest) and rest[0].endswith(".json")
                equals, value = "=", rest.pop(0) if is_file else str(STDOUT)
            result.append(f"{name}{equals}{value}")
            for _ in range(0 if positional or equals else self._values(name)):
                result += [rest.pop(0)] if rest else []
        return result

    @property
    def _interspersed(self) -> bool:
        return bool(self.context_settings.get("allow_interspersed_args", True))

    def _values(self, name: str) -> int:
        """Return how many arguments follow the option; 0 for flags and unknown options."""
        for option in self.params:
            if name in (*option.opts, *option.secondary_opts):
                return 0 if getattr(option, "is_flag", False) else option.nargs
        return 0


def can_be_written(path: Path, option: str) -> None:
    """Check that a file can be written, before work that takes minutes.

    Raises:
        ValueError: The path is a folder or a Python file, or its folder does not exist.
    """
    refuse_script(path, option)
    why = "it is a folder" if path.is_dir() else ""
    why = why or ("" if path.parent.is_dir() else f"{path.parent} is not a folder")
    if why:
        raise ValueError(
            f"{option} {path} can't be written: {why}. HINT: name a file in a folder that exists"
        )


def refuse_script(path: Path, option: str) -> None:
    """Raise ValueError if the file to write is a Python file: a forgotten FILE would destroy it."""
    if path.suffix == ".py":
        raise ValueError(
            f"{option} needs the name of a file to write, not {path}. HINT: {option} FILE {path}"
        )


def _in_whole_paragraphs(text: str) -> str:
    """Join the lines of each paragraph, which Typer would break again where the source does."""
    return "\n\n".join(" ".join(p.split()) for p in inspect.cleandoc(text).split("\n\n"))


def _hide_flag_types(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = " "  # and not "<bool>"


def _without_type(option: Any) -> Any:
    if option is not None:
        option.metavar = " "
    return option


def _plain(word: re.Match[str]) -> str:
    return word[1].removesuffix("...") + ("..." if word[2] else "")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its arguments that are dataclasses.

    The command is called with the dataclasses. A field that is a dataclass has an option for each
    of its fields; a field whose type is not Annotated keeps its default.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)

    def called(**values: Any) -> None:
        command(
            **{
                name: _value(kind, values) if dataclasses.is_dataclass(kind) else values[name]
                for name, kind in hints.items()
            }
        )

    parameters: list[inspect.Parameter] = []
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            parameters += _parameters(kind)
        else:
            default = inspect.signature(command).parameters[name].default
            parameters.append(_parameter(name, kind, default))
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__module__ = command.__module__
    called.__annotations__ = {given.name: given.annotation for given in parameters}
    vars(called)["__signature__"] = inspect.Signature(parameters)
    return called


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command for the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint)
        elif get_origin(hint) is Annotated:
            is_required = field.default is dataclasses.MISSING
            default = inspect.Parameter.empty if is_required else field.default
            yield _parameter(field.name, hint, default)


def _value(kind: Any, values: dict[str, Any]) -> Any:
    """Return the dataclass that has the values of its options."""
    hints = get_type_hints(kind, include_extras=True)
    found = {
        name: _value(hint, values) if dataclasses.is_dataclass(hint) else values[name]
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint) or name in values
    }
    return kind(**found)


def print_json(
    value: dict[str, Any], path: Path, indent: int | None = None, name: str = ""
) -> None:
    """Print ``value`` as JSON, to standard output or to the file of --json.

    Args:
        value: What is printed. It has ``format`` and ``version``, unless ``name`` is given.
        name: Format, of version 1.
    """
    if name:
        value = {"format": name, "version": 1, **value}
    assert {"format", "version"} <= value.keys()
    with json_output(path):
        typer.echo(json.dumps(value, indent=indent))


def given_parameters(ctx: typer.Context) -> dict[str, str]:
    """Return the parameters that the user has typed: by name, as the user knows them."""
    source = ctx.get_parameter_source
    found = {}
    for given in ctx.command.params:
        name = given.name or ""
        if str(getattr(source(name), "name", "")) == "COMMANDLINE":
            is_option = given.param_type_name == "option"
            found[name] = given.opts[0] if is_option else given.metavar or name
    return found


@contextmanager
def json_output(path: Path) -> Iterator[None]:
    """Write what the body prints to standard output to ``path``, unless that is STDOUT."""
    if path == STDOUT:
        yield
        return
    text = io.StringIO()
    with redirect_stdout(text):
        yield
    write_output(path, text.getvalue())
