"""Options of Paceline that were written after the script, and so would go to the script.

Two cases are told apart. The script's source does not mention the option, and nothing else can
read it: always an error. Or it is not known: the script reads ``sys.argv``, keeps unknown options
for others, or imports packages that may define the option. Then ``paceline submit`` refuses,
because its mistakes are seen only after a wait in a queue; the other commands warn.
"""

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import exit_on_mistake, say
from .command import Command

if TYPE_CHECKING:  # every command imports this module
    from ...launch.script_source import ScriptSource

STRICT = ("submit",)  # commands that refuse an option that the script may read
# Names in a script by which it passes options on that it does not define itself.
PASSES_ON = {
    *("argv", "orig_argv", "parse_known_args", "parse_known_intermixed_args", "REMAINDER"),
    *("ignore_unknown_options", "allow_extra_args", "UNPROCESSED", "from_cli"),
    *("run_path", "run_module", "import_module"),
}
BUILTINS = {"exec", "eval", "__import__"}  # the same; methods such as Module.eval are not
# Packages that define no options of a script by themselves.
WITHOUT_OPTIONS = {
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "sklearn", "matplotlib"),
    *("PIL", "tqdm", "yaml", "h5py", "horovod", "mpi4py", "paceline", "rich"),
    *("click", "typer", "fire", "tyro", "docopt", "simple_parsing"),  # read the script's own
}
MAX_PACKAGE_BYTES = 50 << 20  # a larger package is not searched to its end


class Mention(Enum):
    """Whether a script's source mentions an option."""

    FOUND = "found"
    POSSIBLE = "possible"  # the script may pass it on to code that was not read
    ABSENT = "absent"


class ScriptCommand(Command):
    """A command that takes a script and its arguments, and checks these for its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        rest: list[str] = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            with exit_on_mistake():
                self._check(ctx, words)
        return rest

    def _check(self, ctx: Any, words: list[str]) -> None:
        """Raise ValueError, or print a warning, for an own option among the script's arguments.

        ``words``: all arguments of the command. After ``--`` they are the script's.
        """
        script, given = ctx.params["script"], list(ctx.params["args"] or ())
        count = len(given) + 1 + ("folder" in ctx.params)  # of paceline record
        before, after = words[: len(words) - count], words[len(words) - count :]
        if before[-1:] == ["--"]:
            return
        options: dict[str, Any] = {
            name: option
            for option in self.params
            if option.param_type_name == "option" and option.name != "help"
            for name in (*option.opts, *option.secondary_opts)
        }
        spellings = {**self.renamed, **{old: new for old, (new, _) in self.translated.items()}}
        options |= {old: options[new] for old, new in spellings.items()}
        found, name = _first_own(given, options)
        if not name:
            return
        from ...launch.script_source import read_source

        try:
            source = read_source(script, bool(ctx.params["module"]))
        except ValueError:  # no such script: reported where the job is checked
            return
        mention = find_mention(source, name)
        if mention is Mention.FOUND:
            return
        takes_value = not options[name].is_flag and given[found] == name
        own = given[found : found + 1 + takes_value]
        moved = [*after[: -len(given)], *given[:found], *given[found + len(own) :]]
        command = ["paceline", str(self.name)]
        hint = (
            f"for paceline {self.name} write `{shlex.join([*command, *before, *own, *moved])}`; "
            f"for the script, `{shlex.join([*command, *before, '--', *after])}`"
        )
        if mention is Mention.ABSENT:
            raise ValueError(
                f"{name} is after {script} and would be passed to it, but the source of the "
                f"script does not mention it. HINT: {hint}"
            )
        text = (
            f"{name} is after {script} and is passed to it. It may be an option of the script "
            f"or of paceline {self.name}. HINT: {hint}"
        )
        if self.name in STRICT:
            raise ValueError(text)
        if os.environ.get("RANK", "0") == "0":  # every rank is a paceline record
            say(f"warning: {text}", lines=False)


def _first_own(given: Sequence[str], options: dict[str, Any]) -> tuple[int, str]:
    """Return the index of the first argument of the script that is one of ``options``, and the
    name of the option; the name is "" if there is none. ``-n2`` is ``-n``.
    """
    for index, word in enumerate(given):
        if word == "--":
            break
        name = word.partition("=")[0]
        if name in options:
            return index, name
        short = options.get(word[:2])
        if short is not None and word[2:].isdecimal() and not short.is_flag:
            return index, word[:2]
    return 0, ""


def find_mention(source: "ScriptSource", option: str) -> Mention:
    """Return whether the script's source, or a package that it imports, mentions an option.

    A mention is the option or a longer one (argparse accepts abbreviations) in a string; or its
    name as a string, a parameter, a field of a class, or an attribute of an object.
    """
    name = option.lstrip("-").replace("-", "_")
    longer = "" if option.startswith("--") else r"(?!\w)"
    written = re.compile(rf"(?<![\w-]){re.escape(option)}{longer}")
    complete = source.complete
    for code in source.texts.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the script's literals
                words = _read_words(ast.parse(code))
        except (SyntaxError, ValueError, RecursionError):
            complete = False
            continue
        if name in words.names or any(
            written.search(text) or text.replace("-", "_") == name for text in words.strings
        ):
            return Mention.FOUND
        complete = complete and not words.passes_on
    others = sorted(source.packages - WITHOUT_OPTIONS)
    if any(_package_mentions(package, option, name) for package in others):
        return Mention.FOUND
    return Mention.ABSENT if complete and not others else Mention.POSSIBLE


@dataclass
class _Words:
    """What a source file names.

    Attributes:
        names: Parameters, fields of classes, and attributes that are read from objects other than
            imported modules.
        strings: String constants, without lines that show a command of Paceline.
        passes_on: Whether a name of PASSES_ON is used.
    """

    names: set[str]
    strings: set[str]
    passes_on: bool = False


def _read_words(tree: ast.AST) -> _Words:
    found = _Words(set(), set())
    modules: set[str] = set()
    called: set[ast.expr] = set()
    attributes: list[ast.Attribute] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines = node.value.splitlines()
            found.strings.add("\n".join(line for line in lines if "paceline " not in line))
        elif isinstance(node, ast.arg):
            found.names.add(node.arg)
        elif isinstance(node, ast.ClassDef):
            found.names |= {target.id for target in _fields(node)}
        elif isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.passes_on |= any(alias.name in PASSES_ON for alias in node.names)
        elif isinstance(node, ast.Name):
            found.passes_on |= node.id in PASSES_ON or node.id in BUILTINS
        elif isinstance(node, ast.keyword):
            found.passes_on |= node.arg in PASSES_ON
        elif isinstance(node, ast.Call):
            called.add(node.func)
        elif isinstance(node, ast.Attribute):
            attributes.append(node)
    for node in attributes:
        found.passes_on |= node.attr in PASSES_ON
        module = isinstance(node.value, ast.Name) and node.value.id in modules
        if not module and node not in called:
            found.names.add(node.attr)
    found.passes_on |= bool(found.strings & PASSES_ON)
    return found


def _fields(node: ast.ClassDef) -> Iterator[ast.Name]:
    for line in node.body:
        targets = line.targets if isinstance(line, ast.Assign) else []
        targets = [line.target] if isinstance(line, ast.AnnAssign) else targets
        yield from (target for target in targets if isinstance(target, ast.Name))


def _package_mentions(package: str, option: str, name: str) -> bool:
    """Return whether the files of an installed package contain an option, or a field of its name.

    The package is not imported.
    """
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        files: list[Path] = [file for folder in folders for file in Path(folder).rglob("*.py")]
        if spec is not None and not folders and (spec.origin or "").endswith(".py"):
            files.append(Path(str(spec.origin)))
        words = (
            rf"[\"']{re.escape(option)}(?![a-zA-Z])|^\s+{re.escape(name)}\s*:|[(,]\s*{re.escape(name)}"
            r"\s*[:=]"
        )
        pattern, left = re.compile(words.encode(), re.MULTILINE), MAX_PACKAGE_BYTES
        for file in files:
            with contextlib.suppress(OSError):
                text = file.read_bytes()
                left -= len(text)
                if pattern.search(text):
                    return True
            if left < 0:
                break
    return False
