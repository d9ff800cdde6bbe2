"""Options shared by several commands: the script, its ranks, and where and how they run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...launch.guard.request import DIVERGED_EXIT_CODE, Action
from ...launch.options import AUTO, NodeOptions, RankSettings
from .base import exit_on_mistake, say
from .command import STDOUT, can_be_written

if TYPE_CHECKING:  # every command imports this module
    from ...knobs.tuning import Tuning

# Headings of options in --help. Options without a heading come first.
NODES = "Nodes"
BINDING = "Cores and threads"
FAULTS = "Failures and restarts"
DATA = "Data"
EXCHANGE = "Gradient synchronization"
RECORDING = "Recording"
GUARD = "Convergence"
LAYOUTS = "Layouts and rehearsal"


def value_option(
    text: str,
    metavar: str,
    *names: str,
    panel: str | None = None,
    show_default: bool = False,
    **others: Any,
) -> Any:
    """Return an option with a value.

    Args:
        text: Help, which describes the default unless that is shown.
        metavar: Name of the value in the help.
        names: As typed; by default that of the parameter.
        panel: Heading in the help.
        show_default: Whether the help shows the default of the parameter.
        others: Arguments of ``typer.Option``, such as ``min``.
    """
    return typer.Option(
        *names,
        help=text,
        metavar=metavar,
        show_default=show_default,
        rich_help_panel=panel,
        **others,
    )


def flag(name: str, text: str, panel: str | None = None) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=text, rich_help_panel=panel)


def output_option(text: str, *names: str, metavar: str = "FILE", **others: Any) -> Any:
    """Return an option that names a file to write, which is checked before any work begins."""
    return value_option(text, metavar, *names, callback=_check_output, **others)


def _check_output(
    context: typer.Context, parameter: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Refuse a file that can't be written, or is a script, before work that takes minutes."""
    if path is not None and path != STDOUT and not context.resilient_parsing:
        with exit_on_mistake():
            can_be_written(path, max(parameter.opts, key=len))
    return path


Script = Annotated[
    str, typer.Argument(help="Training script, or module with -m.", metavar="SCRIPT")
]
Args = Annotated[
    list[str] | None,
    typer.Argument(
        help="Arguments passed to the script unchanged. Options of this command come before the "
        "script; -- before the script passes everything after it to the script.",
        metavar="ARGS",
    ),
]
Stage = Annotated[
    list[Path] | None,
    value_option(
        "Copy this packed dataset to $PACELINE_STAGE on each node during the training "
        "(see paceline stage). May be repeated.",
        "DATASET",
        panel=DATA,
    ),
]
Pack = Annotated[
    list[str] | None,
    value_option(
        "Source from which the dataset of --stage is packed first if it does not exist, "
        "with options of paceline pack: --pack 'photos/ --resize 256'. The second --pack "
        "belongs to the second --stage.",
        "'SOURCE ...'",
        panel=DATA,
    ),
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module name, as in python -m.")
]
References = Annotated[
    list[Path] | None,
    value_option(
        "Hold the loss of the job against this reference, and report where it leaves its "
        "band: a file of --make-reference, a record folder with losses, or with --metric the "
        "output of a run. May be repeated.",
        "PATH",
        "--reference",
        panel=GUARD,
    ),
]
MetricOption = Annotated[
    str | None,
    value_option(
        "Value to hold against the reference: backward (the loss of each backward), the name "
        "of a value of world.log, or a regular expression for lines of the output, with a group "
        "for the value and optional groups named step and samples. Default: that of the "
        "reference, or backward. With --record, the values are stored in the record folder.",
        "NAME|REGEX",
        "--metric",
        panel=GUARD,
    ),
]
OnDivergence = Annotated[
    Action,
    typer.Option(
        help="What to do when the loss leaves the band of the reference: only report it, have the "
        "ranks write a checkpoint (and stop, with world.epochs), or end the job. Exit code of a "
        f"job that stops: {DIVERGED_EXIT_CODE}.",
        rich_help_panel=GUARD,
    ),
]
Until = Annotated[
    str | None,
    value_option(
        "End the job with exit code 0 when a value of world.log meets this comparison: "
        "'accuracy>=0.97'. With --metric: the values of the metric. A script with "
        "world.epochs(checkpoint=...) writes a checkpoint first.",
        "'NAME>=VALUE'",
        "--until",
        panel=GUARD,
    ),
]
MakeReference = Annotated[
    Path | None,
    value_option(
        "Train SCRIPT on one rank with several seeds, and write its losses to this file or "
        "folder, the reference for paceline run --reference. {seed} in ARGS becomes the number of "
        "the seed; without it, the order of samples and random draws differ, and the initial "
        "parameters where paceline.init sets the seed. paceline run and paceline verify have this "
        "option, and do the same.",
        "PATH",
        panel=GUARD,
    ),
]
Seeds = Annotated[
    int | None,
    value_option("Number of runs of --make-reference. Default: 3.", "N", panel=GUARD, min=1),
]
Settings = Annotated[
    Path | None,
    value_option(
        "Apply the knobs of this settings file (diagnose --save-settings) to every rank: "
        "loader workers, DDP's buckets, threads and others.",
        "FILE",
    ),
]


Horovod = Annotated[
    str | None,
    value_option(
        "What import horovod finds in SCRIPT. ours: paceline.compat.horovod, also if Horovod "
        "is installed. theirs: Horovod, an error if it is not installed. off: what Python finds. "
        "Default: Horovod if it is installed, otherwise paceline.compat.horovod.",
        "off|ours|theirs",
        "--horovod",
        panel=EXCHANGE,
    ),
]
Exchange = Annotated[
    str | None,
    value_option(
        "Backend of collectives between CPU ranks. paceline: shared memory within a node, one "
        "exchange per node between nodes; replaces gloo if the script requests it. gloo: do not "
        "use shared memory. Default: paceline for scripts with paceline.init() or the backend "
        "paceline.",
        "BACKEND",
        panel=EXCHANGE,
    ),
]

TuneExchange = Annotated[
    Path | None,
    output_option(
        "Find the fastest bucket size and all-reduce algorithm for the script's DDP model, or "
        "the fusion threshold and cycle time of Horovod's interface, in the first hundred steps, "
        "and store them in this settings file. Later runs of the same "
        "model on as many ranks and nodes read the file. A setting is kept only if it is faster "
        "than the previous one in interleaved measurements.",
        panel=EXCHANGE,
    ),
]
TuneCompression = Annotated[
    bool,
    flag(
        "--tune-compression",
        "With --tune-exchange: also try gradients as bfloat16. This changes the numbers.",
        panel=EXCHANGE,
    ),
]
Json = Annotated[
    Path | None,
    output_option(
        "Print JSON on standard output instead of a table. --json=FILE, or --json NAME.json, "
        "writes it to a file, and no table is printed.",
        "--json",
        metavar="[=FILE]",
        readable=False,  # standard output may be a pipe that only can be written to
    ),
]


@dataclass(frozen=True)
class ScriptOptions:
    """The script, its arguments and its number of ranks."""

    script: Script
    args: Args = None
    ranks: Annotated[
        int | None,
        value_option(
            "Number of ranks on all nodes. Default: one for each GPU; without GPUs, the tasks "
            "that the scheduler sets, or one for each NUMA domain.",
            "N",
            "-n",
            "--ranks",
        ),
    ] = None
    module: Module = False

    @property
    def words(self) -> list[str]:
        """The script and its arguments, as ``paceline run`` takes them."""
        return [*["-m"] * self.module, self.script, *(self.args or [])]


@dataclass(frozen=True)
class HostOptions(NodeOptions):
    """The options that choose the nodes."""

    hosts: Annotated[
        str | None,
        value_option(
            "Hosts, reached over ssh, with their numbers of ranks: host1:4,host2:4.",
            "HOST[:N],...",
            "-H",
            "--hosts",
            panel=NODES,
        ),
    ] = None
    hostfile: Annotated[
        Path | None,
        value_option(
            "File with one host per line: host1, host1:4 or host1 slots=4.", "FILE", panel=NODES
        ),
    ] = None
    launcher: Annotated[
        str | None,
        value_option(
            "Tool that starts an agent on each node: ssh, srun, jsrun, blaunch, palsrun, "
            "flux, mpirun or mpiexec. Default: that of the scheduler, or ssh.",
            "TOOL",
            panel=NODES,
        ),
    ] = None


@dataclass(frozen=True)
class HostAndEnvOptions(HostOptions):
    """The options that choose the nodes, and the environment variables of the ranks."""

    env: Annotated[
        list[str] | None,
        value_option(
            "Set an environment variable on every rank: NAME=VALUE, or NAME to forward its "
            "current value. May be repeated. Over ssh, PATH, VIRTUAL_ENV, OMP_*, NCCL_* and "
            "similar ones are forwarded automatically.",
            "NAME[=VALUE]",
            panel=NODES,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RankOptions(RankSettings):
    """How ranks run: binding, threads, interpreter, and when they hang."""

    bind: Annotated[
        str,
        value_option(
            "Bind ranks: core (exclusive cores, in one NUMA node if possible), device (cores "
            "near its GPU), numa or socket (a whole NUMA node or socket), none; auto: device or "
            "core if the cores belong to this job alone, otherwise none.",
            "HOW",
            panel=BINDING,
            show_default=True,
        ),
    ] = AUTO
    threads: Annotated[
        int | None,
        value_option(
            "Threads of each rank (OMP_NUM_THREADS, torch, TensorFlow). Default: "
            "OMP_NUM_THREADS, or one for each core of the rank.",
            "N",
            panel=BINDING,
        ),
    ] = None
    cpus_per_rank: Annotated[
        int | None,
        value_option(
            "Cores of each rank. Default: an equal part of the granted cores.", "N", panel=BINDING
        ),
    ] = None
    smt: Annotated[
        bool | None,
        typer.Option(
            "--smt/--no-smt",
            help="Start a thread for each hardware thread of a rank's cores, or leave all but one "
            "hardware thread of each core unused. Default: one thread for each core.",
            show_default=False,
            rich_help_panel=BINDING,
        ),
    ] = None
    fresh: Annotated[
        bool,
        flag(
            "--fresh",
            "Start a new interpreter for every rank, instead of a fork of a process that has "
            "imported torch. Set automatically if OMP_PLACES, KMP_AFFINITY, GOMP_CPU_AFFINITY or "
            "LD_PRELOAD is set, or --env sets PYTHONHASHSEED, PYTHONOPTIMIZE, PYTHONPATH or "
            "PYTHONWARNINGS.",
            panel=BINDING,
        ),
    ] = False
    hang_timeout: Annotated[
        float | None,
        value_option(
            "Seconds without progress on any rank (at least three times the longest pause so "
            "far) before Paceline reports a hang: which ranks are missing from which collective, "
            "with all stacks. Paceline then restarts or ends the job (exit code 124). Default: "
            "300; without this option, Paceline restarts or ends the job only if a collective "
            "cannot complete, and otherwise prints a warning. 0 disables hang detection.",
            "SECONDS",
            panel=FAULTS,
        ),
    ] = None

    def words(self) -> list[str]:
        """Return the options that differ from their defaults: reports repeat them in commands."""
        words = [] if self.smt is None else ["--smt" if self.smt else "--no-smt"]
        return words + option_words(
            {
                "--fresh": self.fresh,
                "--threads": self.threads,
                "--bind": None if self.bind == AUTO else self.bind,
                "--cpus-per-rank": self.cpus_per_rank,
                "--hang-timeout": self.hang_timeout,
            }
        )


def launch_words(
    module: bool, how: RankOptions, nodes: NodeOptions, others: dict[str, Any]
) -> list[str]:
    """Return the options of ``paceline run`` that do not select the hosts."""
    return ["-m"] * module + how.words() + option_words({**others, "--env": nodes.env})


def option_words(values: dict[str, Any]) -> list[str]:
    """Return the words of options: none for None and False, the name alone for True."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            for each in value if isinstance(value, list) else [value]:
                words += [name, str(each)]
    return words


SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bytes_of(text: str, option: str) -> int:
    """Return the number of bytes of a size, e.g. 16777216 for 16M.

    Raises:
        ValueError: ``text`` is not a size; the message names ``option``.
    """
    number, unit = text.strip().rstrip("iB"), 1
    if number[-1:].upper() in SIZE_UNITS:
        unit = SIZE_UNITS[number[-1].upper()]
        number = number[:-1]
    try:
        return int(float(number) * unit)
    except ValueError:
        raise ValueError(
            f"{option} must be a size; this is {text!r}. HINT: 64K, 16M or 1G"
        ) from None


def layout_knob(layout: str | None) -> dict[str, Any]:
    """Return the knob that --layout sets. Raises ValueError for a text that is no layout."""
    if layout is None:
        return {}
    from ...cost.layout import Layout

    try:
        return {"layout": str(Layout.parse(layout))}
    except ValueError as error:
        raise ValueError(f"--layout: {error}") from None


def knobs_of(settings: Path | None, script: str, exchange: str | None = None) -> dict[str, Any]:
    """Return the knobs that --settings and --exchange set; print a message for ignored ones.

    Raises:
        ValueError: The settings file is not valid, or the exchange is unknown.
    """
    if settings is None and exchange is None:
        return {}
    from ...knobs.registry import KNOBS
    from ...knobs.settings import settings_for_script

    knobs, notes = settings_for_script(settings, script) if settings is not None else ({}, [])
    for note in notes:
        say(note, lines=False)
    kind = KNOBS["exchange"].value
    if exchange is not None:
        if kind is None or not kind.fits(exchange):
            raise ValueError(
                f"--exchange must be {kind}; this is {exchange!r}. HINT: leave it "
                "out for the default"
            )
        knobs["exchange"] = exchange
    return knobs


def tuning_of(
    file: Path | None, compression: bool, script: str, knobs: dict[str, Any]
) -> "Tuning | None":
    """Return the options of --tune-exchange, and add the knobs that it needs to ``knobs``.

    Raises:
        ValueError: The options or the knobs contradict --tune-exchange, or the file exists and is
            not from --tune-exchange.
    """
    if file is None:
        if compression:
            raise ValueError(
                "--tune-compression needs --tune-exchange. HINT: add --tune-exchange FILE"
            )
        return None
    from ...knobs.registry import LESS
    from ...knobs.settings import read
    from ...knobs.tuning import Tuning, made

    for name in ("bucket-mb", "algorithm", "fusion-mb", "cycle-ms", *LESS):
        if name in knobs:
            raise ValueError(
                f"--tune-exchange searches for {name}, which a setting fixes. HINT: "
                "remove one of the two"
            )
    if file.exists():
        made(file, read(file))
    gloo = "exchange" not in knobs  # untuned all-reduces use gloo, as without this option
    knobs.setdefault("exchange", "paceline")
    return Tuning(str(file.absolute()), Path(script).name, gloo, compression)
