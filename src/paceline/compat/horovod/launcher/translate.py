"""Translate a command line of horovodrun or ddlrun into one of ``paceline run``."""

import difflib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ....cluster.schedulers.detect import find_allocation
from ....cluster.schedulers.hostfile import Host, parse_hosts, read_hostfile
from ....launch.recovery.discovery import discover_hosts
from .option_table import DDLRUN, HOROVODRUN, LaunchOption, read_config

RESTARTS = 10  # of elastic jobs without --reset-limit; Horovod has no limit
TOOLS = {"horovodrun": HOROVODRUN, "ddlrun": DDLRUN}
_PYTHON_FLAGS = {"-u": (), "-B": ("PYTHONDONTWRITEBYTECODE=1",), "-O": ("PYTHONOPTIMIZE=1",)}
_PYTHON_FLAGS |= {"-OO": ("PYTHONOPTIMIZE=2",)}


@dataclass
class RunCommand:
    """A command line of ``paceline run``.

    Attributes:
        words: Options of ``paceline run``, the script, and its arguments.
        ssh: Options of ssh, for the environment variable PACELINE_SSH_OPTIONS.
        unused: Options without effect, by the reason.
        role: "version" or "build" if only that is requested, else "".
    """

    words: list[str] = field(default_factory=list)
    ssh: list[str] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)
    role: str = ""

    def lines(self, tool: str) -> list[str]:
        """Return what to tell the user: options without effect, and the command."""
        notes = [
            f"{tool} {', '.join(names)}: no effect, {why}" for why, names in self.unused.items()
        ]
        return [*notes, shlex.join(["paceline", "run", *self.words])]


def translate(tool: str, words: list[str]) -> RunCommand:
    """Return the command of ``paceline run`` for a command line of horovodrun or ddlrun.

    Args:
        tool: "horovodrun" or "ddlrun".
        words: Arguments of the tool.

    Raises:
        ValueError: An option is unknown or invalid, or the program is not Python.
    """
    result, given, rest = RunCommand(), _Given(), list(words)
    for option, name, values in _options(tool, rest):
        _apply(option, name, values, result, given)
    if given.roles & {"version", "build"}:
        result.role = "version" if "version" in given.roles else "build"
        return result
    result.words += _hosts(given)
    result.words += [word for item in given.variables.items() for word in _env("=".join(item))]
    result.words += _python(tool, rest)
    return result


@dataclass
class _Given:
    """Options that are handled together."""

    values: dict[str, str] = field(default_factory=dict)  # by role
    variables: dict[str, str] = field(default_factory=dict)
    ranks: str = ""

    @property
    def roles(self) -> set[str]:
        return set(self.values)


def _options(tool: str, rest: list[str]) -> Iterator[tuple[LaunchOption, str, list[str]]]:
    """Remove the options from ``rest``, and yield each with its name and values.

    Options of a configuration file come first: those of the command line replace them.
    """
    table = {name: option for option in TOOLS[tool] for name in option.names}
    found: list[tuple[LaunchOption, str, list[str]]] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        option = table.get(name) or _abbreviated(name, table)
        if option is None:
            raise ValueError(f"{tool} has no option {name}. HINT: {_suggestion(tool, name, table)}")
        values = [value] if equals else [rest.pop(0) for _ in range(min(option.values, len(rest)))]
        if len(values) != option.values:
            count = f"{option.values or 'no'} value{'s' * (option.values > 1)}"
            raise ValueError(
                f"{tool} {name} needs {count}. HINT: {tool} {name}{' VALUE' * option.values}"
            )
        if option.role == "config":
            found = [(table[n], n, v) for n, v in read_config(Path(values[0]))] + found
        else:
            found.append((option, name, values))
    yield from found


def _abbreviated(name: str, table: dict[str, LaunchOption]) -> LaunchOption | None:
    """Return the only option that begins with ``name``, which argparse accepts as well."""
    if not name.startswith("--") or len(name) < 4:
        return None
    options = {id(option): option for long, option in table.items() if long.startswith(name)}
    return next(iter(options.values())) if len(options) == 1 else None


def _suggestion(tool: str, name: str, table: dict[str, LaunchOption]) -> str:
    """Return the option of which ``name`` is probably the beginning."""
    alike = {
        one: difflib.SequenceMatcher(None, name, one[: len(name) + 1]).ratio() for one in table
    }
    near = max(alike, key=alike.__getitem__)
    return f"{tool} {near}" if alike[near] > 0.7 else f"paceline {tool} --help names the options"


def _apply(
    option: LaunchOption, name: str, values: list[str], result: RunCommand, given: _Given
) -> None:
    value = values[0] if values else ""
    if option.run == "-n":
        given.ranks = value
    elif option.variable:
        try:
            given.variables[option.variable] = (
                option.convert(value) if option.values else option.flag
            )
        except ValueError:
            raise ValueError(f"{name} {value} is not a number. HINT: {name} 64") from None
    elif option.unused:
        result.unused.setdefault(option.unused, []).append(name)
    elif option.role == "ssh-port":
        result.ssh += ["-p", str(_number(name, value))]
    elif option.role == "ssh-identity":
        result.ssh += ["-i", value]
    elif option.role == "interfaces":
        given.variables["GLOO_SOCKET_IFNAME"] = value.partition(",")[0]
        given.variables["NCCL_SOCKET_IFNAME"] = value
    elif option.role == "jsrun":
        result.words += ["--launcher", "jsrun"]
    elif option.role == "rankfile":
        raise ValueError(
            f"{name} {value}: Paceline reads no rank files. HINT: -H host1:4,host2:4, or paceline "
            "run --hostfile FILE with one host a line"
        )
    elif option.role:
        given.values[option.role] = value


def _env(assignment: str) -> list[str]:
    return ["--env", assignment]


def _number(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} {text} must be a number, 1 or more. HINT: {name} 1")
    return number


def _hosts(given: _Given) -> list[str]:
    """Return the options of ``paceline run`` for the hosts, the number of ranks, and restarts."""
    values = given.values
    ranks = _number("-np", given.ranks) if given.ranks else None
    slots = _number("--slots-per-host", values["slots"]) if "slots" in values else None
    elastic = bool(given.roles & {"discovery", "min"})
    hosts = _named_hosts(values, slots)
    words: list[str] = []
    if hosts and (slots or "hostfile" not in values):
        words += [
            "-H",
            ",".join(f"{host.name}:{host.slots}" if host.slots else host.name for host in hosts),
        ]
    elif "hostfile" in values:
        words += ["--hostfile", values["hostfile"]]
    elif slots and ranks is None:  # on the allocation's hosts, or on this one
        allocation = find_allocation(os.environ)
        ranks = slots * (len(allocation.hosts) if allocation is not None else 1)
    if elastic:
        words += _restarts(values, hosts, ranks)
        ranks = _elastic_ranks(values, hosts, ranks)
    if "discovery" in values:
        words += ["--host-discovery-script", values["discovery"]]
    return [*(["-n", str(ranks)] if ranks else []), *words]


def _named_hosts(values: dict[str, str], slots: int | None) -> list[Host]:
    if "discovery" in values:
        hosts = discover_hosts(values["discovery"])
        if bare := [host.name for host in hosts if not host.slots and not slots]:
            raise ValueError(
                f"--host-discovery-script {values['discovery']} printed {bare[0]} without a number "
                "of slots. HINT: --slots-per-host 4, or one host a line: host1:4"
            )
    elif "hosts" in values:
        hosts = parse_hosts(values["hosts"])
    elif "hostfile" in values:
        hosts = read_hostfile(values["hostfile"])
    else:
        hosts = []
    return [Host(host.name, host.slots or slots) for host in hosts]


def _elastic_ranks(values: dict[str, str], hosts: list[Host], ranks: int | None) -> int | None:
    """Return the number of ranks of an elastic job: all slots, up to --max-np. With a discovery
    script, return the largest number, or None without a limit.
    """
    total = sum(host.slots or 0 for host in hosts)
    if not total:
        return ranks
    least = _number("--min-np", values["min"]) if "min" in values else ranks or 1
    if total < least:
        raise ValueError(
            f"--min-np {least}: the hosts have {total} slots. HINT: name more hosts, or "
            f"--min-np {total}"
        )
    most = _number("--max-np", values["max"]) if "max" in values else None
    if "discovery" in values:
        return most
    return min(total, most) if most is not None else total


def _restarts(values: dict[str, str], hosts: list[Host], ranks: int | None) -> list[str]:
    """Return the options with which an elastic job continues without lost hosts."""
    limit = _number("--reset-limit", values["restarts"]) if "restarts" in values else RESTARTS
    words = ["--max-restarts", str(limit)]
    discovers = "discovery" in values
    least = _number("--min-np", values["min"]) if "min" in values else ranks
    slots = sorted(host.slots or 0 for host in hosts)
    if discovers:
        least = least or 1
    elif least is None or len(slots) < 2 or not slots[0]:
        return words
    count = next((n for n in range(1, len(slots) + 1) if sum(slots[:n]) >= least), len(slots))
    return [*words, "--min-hosts", str(count)]


def _python(tool: str, rest: list[str]) -> list[str]:
    """Return the script and its arguments from the program: ``python -u train.py``.

    Raises:
        ValueError: The program is not Python, or Python's options have no equivalent.
    """
    if not rest:
        raise ValueError(f"{tool} needs a program. HINT: paceline {tool} -np 4 python train.py")
    program, words = rest[0], list(rest[1:])
    if program.endswith(".py"):
        return ["--", *rest]
    if not Path(program).name.startswith("python"):
        raise ValueError(
            f"{tool} starts {program}, which is not Python. Paceline runs Python scripts. HINT: "
            f"paceline {tool} -np 4 python train.py"
        )
    _check_interpreter(program)
    options: list[str] = []
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "-m" and words:
            return [*options, "-m", "--", *words]
        if word in _PYTHON_FLAGS:
            options += [one for flag in _PYTHON_FLAGS[word] for one in _env(flag)]
        elif word == "-W" and words:
            options += _env(f"PYTHONWARNINGS={words.pop(0)}")
        elif word == "-X" and words:
            words.pop(0) if words[0] == "faulthandler" else _refuse(tool, f"-X {words[0]}")
        else:
            _refuse(tool, word)
    if not words:
        raise ValueError(f"{tool} {program} needs a script. HINT: {tool} -np 4 python train.py")
    return [*options, "--", *words]


def _refuse(tool: str, option: str) -> None:
    raise ValueError(
        f"{tool}: Paceline runs scripts and modules, and does not pass the option {option} to "
        "Python. HINT: leave it out, or set the environment variable of the same meaning"
    )


def _check_interpreter(program: str) -> None:
    """Raise ValueError if the path ``program`` is in another Python environment than Paceline."""
    if program == Path(program).name:
        return
    prefix = Path(program).parent.resolve().parent
    if prefix != Path(sys.prefix).resolve():
        raise ValueError(
            f"{program} is not the Python of this environment ({sys.prefix}), in which Paceline is "
            "installed. HINT: write python, or install Paceline in the other one"
        )
