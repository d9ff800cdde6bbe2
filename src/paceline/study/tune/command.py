"""The command of a trial: placeholders become the values of its parameters."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...security.text import printable
from .parameters import Parameter, Value, nearest

PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
OPTIONAL = re.compile(r"\[([^\[\]]*\{[^\[\]]*)\]")
# Placeholders that Paceline fills in.
OWN = ("checkpoint", "folder", "trial", "seed", "ranks", "epochs")
CHECKPOINT, FOLDER, TRIAL, SEED, RANKS, EPOCHS = OWN
FUNCTION_MODULE = "paceline.study.tune.call_function"


@dataclass(frozen=True)
class Command:
    """What a trial runs.

    Attributes:
        text: Script and arguments with placeholders; "" for a function.
        function: FILE.py:NAME or MODULE:NAME, or "".
        optional: Names of the parameters that do not exist at each point.
    """

    text: str
    function: str = ""
    optional: frozenset[str] = frozenset()

    @property
    def placeholders(self) -> set[str]:
        return set(PLACEHOLDER.findall(self.text))

    def words(self, values: Mapping[str, Value], own: Mapping[str, str]) -> list[str]:
        """Return the words after ``paceline run``.

        Args:
            values: Values of the parameters that exist and are no knobs.
            own: Values of Paceline's placeholders.
        """
        if self.function:
            arguments = json.dumps({"values": dict(values), "own": dict(own)})
            return ["-m", FUNCTION_MODULE, self.function, arguments]
        known = {**{name: as_text(value) for name, value in values.items()}, **own}

        def keep(part: re.Match[str]) -> str:
            names = set(PLACEHOLDER.findall(part[1]))
            if not names & self.optional:
                return part[0]
            return part[1] if names <= set(known) else ""

        words = []
        for word in shlex.split(OPTIONAL.sub(keep, self.text)):
            filled = PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), word)
            if filled or not PLACEHOLDER.fullmatch(word):
                words.append(filled)
        return words


def as_text(value: Value) -> str:
    """Return a value as an argument."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def check_command(
    command: str | None, function: str | None, parameters: Sequence[Parameter], has_epochs: bool
) -> Command:
    """Check that the command has a placeholder for each parameter, and the other way round.

    Raises:
        ValueError: It does not, or is no command.
    """
    if (command is None) == (function is None):
        raise ValueError(
            "the table [study] needs either command or function. HINT: command = "
            '"train.py --lr {lr}"'
        )
    if function is not None:
        return _check_function(function, parameters)
    assert command is not None
    names = [parameter.name for parameter in parameters if not parameter.knob]
    if taken := sorted(set(names) & set(OWN)):
        raise ValueError(
            f"parameters.{taken[0]}: {{{taken[0]}}} is filled in by Paceline. HINT: another name"
        )
    found = PLACEHOLDER.findall(command)
    for name in found:
        if name not in (*names, *OWN):
            near = nearest(name, (*names, *OWN))
            hint = f"{{{near}}}, or add" if near else "add"
            raise ValueError(
                f"study.command has the placeholder {{{name}}}, and there is no parameter of that "
                f"name. HINT: {hint} a table [parameters.{name}]"
            )
    for name in names:
        if name not in found:
            near = nearest(name, set(found) - set(names)) or name
            raise ValueError(
                f"parameters.{name} has no placeholder in study.command, so it would change "
                f"nothing. HINT: add {{{name}}} to the command"
                + (f" (it has {{{near}}})" if near != name else "")
            )
    if EPOCHS in found and not has_epochs:
        raise ValueError("study.command has {epochs}. HINT: add epochs = N to the table [study]")
    optional = frozenset(
        parameter.name for parameter in parameters if parameter.when and not parameter.knob
    )
    outside = set(PLACEHOLDER.findall(OPTIONAL.sub("", command)))
    for name in sorted(optional & outside):
        raise ValueError(
            f"parameters.{name} does not exist at each point (when), and study.command always has "
            f"{{{name}}}. HINT: write that part in brackets: [--{name} {{{name}}}]"
        )
    _check_words(command)
    return Command(command, optional=optional)


def _check_words(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"study.command can't be split into words: {error}") from None
    if not words:
        raise ValueError("study.command is empty")
    first = Path(words[0]).name
    if first.startswith(("python", "torchrun", "paceline", "srun", "mpirun")):
        rest = [word for word in words[1:] if word != "run"][:1]
        raise ValueError(
            f"study.command begins with {first}, and Paceline starts the ranks itself. HINT: begin "
            f"with the script{f': {printable(rest[0])}' if rest else ''}; study.ranks is the "
            "number of ranks"
        )


def _check_function(function: str, parameters: Sequence[Parameter]) -> Command:
    where, separator, name = function.rpartition(":")
    if not separator or not where or not name.isidentifier():
        raise ValueError(
            f'study.function = "{function}" is no function. HINT: "train.py:train" or '
            '"package.module:train"'
        )
    for parameter in parameters:
        if not parameter.name.isidentifier():
            raise ValueError(
                f"parameters.{parameter.name}: arguments of a function are identifiers"
            )
    optional = frozenset(parameter.name for parameter in parameters if parameter.when)
    return Command("", function, optional)
