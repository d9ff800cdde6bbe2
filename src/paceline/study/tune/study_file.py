"""The study file: what ``paceline tune`` runs, which parameters it varies, and its budget."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ...cost.layout import Layout
from ...cost.machine.toml_files import read_toml
from ...knobs.layouts import LAYOUT as LAYOUT_KNOB
from ...knobs.settings import exclude
from ...plurals import counted
from ...security.files import InvalidFileError
from .command import Command, check_command
from .parameters import Parameter, ParameterTable, Value, is_active, nearest, parameter_of

MAX_FILE_BYTES = 1 << 20
MAX_PARAMETERS = 1000
# Keys of [study] that may change while a study goes on: they limit it, or say how it is run.
FREE_KEYS = frozenset(
    ("trials", "minutes", "node_hours", "total_epochs", "side_by_side", "cores", "trial_minutes")
)
MIN, MAX, BEST = "min", "max", "best"
# Metrics that Paceline measures itself.
SECONDS, NODE_HOURS = "seconds", "node_hours"

Positive = Annotated[float, Meta(gt=0, le=1e9)]
Number = Annotated[int, Meta(ge=1, le=10**9)]
Text = Annotated[str, Meta(min_length=1, max_length=10_000)]
Goal = Literal["min", "max"]


class StudyTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The table ``[study]``.

    Attributes:
        command: Script and arguments with placeholders; or
        function: FILE.py:NAME or MODULE:NAME of a Python function.
        metric: Name of the metric, or of several ones.
        goal: Whether it is to be small or large; one for each metric.
        trials: Maximum number of trials.
        search: Name of a sampler.
        pruner: Name of a pruner.
        ranks: Ranks of a trial.
        cores: Cores of each rank.
        side_by_side: Maximum number of trials at the same time; None: as many as there is room for.
        epochs: Epochs of a whole trial.
        total_epochs, minutes, node_hours: Budget of all trials.
        trial_minutes: Maximum duration of a trial.
        value: Which report is the value of a trial: the last or the best one.
        repeats: Runs of a trial with different seeds, whose mean is its value.
        repeat: Whether all trials are repeated, or only those that are among the best.
        seed: Seed of the search; {seed} of the first run of each trial.
        hang_timeout: Same as for ``paceline run``.
        env: Same as for ``paceline run``.
    """

    metric: Text | Annotated[list[Text], Meta(min_length=1, max_length=8)]
    goal: Goal | Annotated[list[Goal], Meta(min_length=1, max_length=8)]
    command: Text | None = None
    function: Text | None = None
    trials: Number = 50
    search: Text = "tpe"
    pruner: Text = "none"
    ranks: Number = 1
    cores: Number | None = None
    side_by_side: Number | None = None
    epochs: Number | None = None
    total_epochs: Number | None = None
    minutes: Positive | None = None
    node_hours: Positive | None = None
    trial_minutes: Positive | None = None
    value: Literal["last", "best"] = "last"
    repeats: Annotated[int, Meta(ge=1, le=100)] = 1
    repeat: Literal["all", "best"] = "all"
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    hang_timeout: Annotated[float, Meta(ge=0)] | None = None
    env: Annotated[list[Text], Meta(max_length=100)] = []


class StudyTree(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A study file."""

    study: StudyTable
    parameters: Annotated[dict[str, ParameterTable], Meta(min_length=1, max_length=MAX_PARAMETERS)]
    known: Annotated[list[dict[str, Value]], Meta(max_length=10_000)] = []
    patterns: Annotated[dict[str, Text], Meta(max_length=100)] = {}
    search: dict[str, Any] = {}
    pruner: dict[str, Any] = {}


@dataclass(frozen=True)
class StudySpec:
    """A study file that was checked.

    Attributes:
        path: The file.
        table: Its table ``[study]``.
        parameters: The parameters; those that others depend on come first.
        known: Points that are tried first.
        patterns: Regular expressions for lines of the output, by the metric that they give.
        search_options, pruner_options: Options of the sampler and the pruner.
        command: The command.
        identity: Content of the file that must not change while the study continues.
    """

    path: Path
    table: StudyTable
    parameters: tuple[Parameter, ...]
    known: tuple[dict[str, Value], ...]
    patterns: dict[str, str]
    search_options: dict[str, Any]
    pruner_options: dict[str, Any]
    command: Command
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        metric = self.table.metric
        return (metric,) if isinstance(metric, str) else tuple(metric)

    @property
    def goals(self) -> tuple[str, ...]:
        goal = self.table.goal
        return (goal,) * len(self.metrics) if isinstance(goal, str) else tuple(goal)

    @property
    def reported(self) -> tuple[str, ...]:
        """The metrics that trials report: without those that Paceline measures."""
        return tuple(name for name in self.metrics if name not in (SECONDS, NODE_HOURS))

    @property
    def folder(self) -> Path:
        """Folder of the file, from which trials are started."""
        return self.path.absolute().parent

    @property
    def name(self) -> str:
        return self.path.stem

    def knobs(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return the knobs of a point, by their names."""
        return {
            parameter.knob: values[parameter.name]
            for parameter in self.parameters
            if parameter.knob and parameter.name in values
        }

    def words(self, values: Mapping[str, Value], own: Mapping[str, str]) -> list[str]:
        """Return the words after ``paceline run``. own: Values of Paceline's placeholders."""
        knobs = {parameter.name for parameter in self.parameters if parameter.knob}
        return self.command.words({n: v for n, v in values.items() if n not in knobs}, own)


def read_study_file(path: Path) -> StudySpec:
    """Read and check a study file.

    Raises:
        ValueError: It is no study file, or can't be run; the message names the key.
        OSError: It can't be read.
    """
    tree = read_toml(path, MAX_FILE_BYTES)
    _check_keys(tree, path)
    try:
        found = msgspec.convert(tree, StudyTree)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidFileError(path, _words(str(error), tree)) from None
    try:
        return _checked(path, found, tree)
    except InvalidFileError:
        raise
    except ValueError as mistake:
        raise ValueError(f"{path}: {mistake}") from None


def _checked(path: Path, found: StudyTree, tree: dict[str, Any]) -> StudySpec:
    table = found.study
    parameters = _in_order([parameter_of(*item) for item in found.parameters.items()])
    command = check_command(table.command, table.function, parameters, table.epochs is not None)
    identity = {key: value for key, value in tree.items() if key != "study"}
    identity["study"] = {k: v for k, v in tree["study"].items() if k not in FREE_KEYS}
    spec = StudySpec(
        path,
        table,
        tuple(parameters),
        tuple(found.known),
        dict(found.patterns),
        dict(found.search),
        dict(found.pruner),
        command,
        identity,
    )
    _check_metrics(spec)
    _check_layouts(spec)
    _check_known(spec)
    _check_budget(spec)
    return spec


def changes(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """Return the differences between two identities, one sentence each."""
    found = []
    for key in sorted({*old, *new}):
        name = f"{where}.{key}" if where else key
        if key not in old:
            found.append(f"{name} = {_shown(new[key])} is new")
        elif key not in new:
            found.append(f"{name} = {_shown(old[key])} was removed")
        elif isinstance(old[key], dict) and isinstance(new[key], dict):
            found += changes(old[key], new[key], name)
        elif old[key] != new[key]:
            found.append(f"{name} was {_shown(old[key])} and is {_shown(new[key])}")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_keys(tree: dict[str, Any], path: Path) -> None:
    """Raise InvalidFileError for a key that is unknown, with the nearest one."""
    tables: list[tuple[str, Any, Sequence[str]]] = [
        ("", tree, StudyTree.__struct_fields__),
        ("study.", tree.get("study"), StudyTable.__struct_fields__),
    ]
    parameters = tree.get("parameters")
    for name, table in parameters.items() if isinstance(parameters, dict) else ():
        tables.append((f"parameters.{name}.", table, ParameterTable.__struct_encode_fields__))
    for where, table, known in tables:
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                near = nearest(key, known)
                hint = f"{where}{near}" if near else f"the keys are {', '.join(known)}"
                raise InvalidFileError(path, f"the key {where}{key} is not known. HINT: {hint}")
    if "study" not in tree:
        raise InvalidFileError(
            path, "has no table [study]. HINT: [study] with command, metric and goal"
        )
    if "parameters" not in tree:
        raise InvalidFileError(
            path,
            "has no parameters. HINT: a table [parameters.NAME] with low and high, or choices, for "
            "each placeholder of the command",
        )


def _words(error: str, tree: dict[str, Any]) -> str:
    """Return an error of msgspec as a sentence about a key."""
    reason, _, place = error.partition(" - at ")
    place = place.strip("`").removeprefix("$.").replace("`", "")
    if "missing required field" in reason:
        key = reason.rpartition("`")[0].rpartition("`")[2]
        return f"the table [{place or 'study'}] has no {key}"
    table, _, key = place.partition(".")
    text, given = reason.replace("`", ""), tree.get(table)
    value = given.get(key.partition("[")[0]) if isinstance(given, dict) else None
    if value is None:
        return f"{place or 'the file'}: {text}"
    if table == "study" and (
        choices := _choices(get_type_hints(StudyTable)[key.partition("[")[0]])
    ):
        return f"{place}: {value!r} is not known. HINT: {' or '.join(map(repr, choices))}"
    return f"{place}: {text}; it is {value!r}"


def _choices(kind: Any) -> list[str]:
    """Return the values of the literals in a type."""
    if get_origin(kind) is Literal:
        return [str(literal) for literal in get_args(kind)]
    return [literal for part in get_args(kind) for literal in _choices(part)]


def _in_order(parameters: list[Parameter]) -> list[Parameter]:
    """Return the parameters, each after those that it depends on. Raises ValueError."""
    by_name = {parameter.name: parameter for parameter in parameters}
    for parameter in parameters:
        for name, values in parameter.when.items():
            if name not in by_name:
                near = nearest(name, by_name)
                hint = f"HINT: {near}" if near else "HINT: name a parameter of this file"
                raise ValueError(
                    f"parameters.{parameter.name}.when names no parameter: {name}. {hint}"
                )
            for value in values:
                if not by_name[name].accepts(value):
                    raise ValueError(
                        f"parameters.{parameter.name}.when: {name} is never {value!r}. HINT: "
                        f"one of {by_name[name].range_text}"
                    )
    ordered: list[Parameter] = []
    while len(ordered) < len(parameters):
        names = {parameter.name for parameter in ordered}
        ready = [
            parameter
            for parameter in parameters
            if parameter.name not in names and set(parameter.when) <= names
        ]
        if not ready:
            circle = sorted(set(by_name) - names)
            raise ValueError(f"the parameters {', '.join(circle)} depend on each other (when)")
        ordered += ready
    return ordered


def _check_metrics(spec: StudySpec) -> None:
    table, metrics = spec.table, spec.metrics
    if len(set(metrics)) < len(metrics):
        raise ValueError("study.metric names a metric twice")
    if not isinstance(table.goal, str) and len(table.goal) != len(metrics):
        raise ValueError(
            f"study.goal has {counted(len(table.goal), 'value')} for "
            f"{counted(len(metrics), 'metric')}. HINT: one goal for each metric, in their order"
        )
    if not spec.reported:
        raise ValueError(
            f"study.metric = {', '.join(metrics)} is measured by Paceline alone. HINT: add a "
            "metric that the script reports"
        )
    for name, pattern in spec.patterns.items():
        if name not in spec.reported:
            near = nearest(name, spec.reported) or spec.reported[0]
            raise ValueError(f"patterns.{name} is of no metric of study.metric. HINT: {near}")
        _check_pattern(name, pattern, table.pruner)
    if len(metrics) > 1 and table.pruner != "none":
        raise ValueError(
            f'study.pruner = "{table.pruner}" compares trials by one metric, and this study has '
            f"{len(metrics)}. HINT: leave out the pruner, or all metrics but one"
        )
    if table.repeats > 1 and table.pruner != "none":
        raise ValueError(
            f'study.repeats = {table.repeats} can\'t be combined with pruner = "{table.pruner}": '
            "the mean of a trial is known after its last run. HINT: leave out one of them"
        )
    if table.repeat == "best" and (table.repeats == 1 or len(metrics) > 1):
        raise ValueError(
            f'study.repeat = "best" needs repeats above 1 and one metric; repeats is '
            f"{table.repeats}, and the study has {counted(len(metrics), 'metric')}. HINT: "
            "repeats = 3"
        )
    if table.repeats > 1 and "seed" not in spec.command.placeholders and table.function is None:
        raise ValueError(
            f"study.repeats = {table.repeats} runs each trial with several seeds, and the command "
            "has no {seed}. HINT: add an argument such as --seed {seed}"
        )


def _check_pattern(name: str, pattern: str, pruner: str) -> None:
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"patterns.{name} = {_shown(pattern)} is no regular expression: {error}. HINT: test it "
            "with Python's re.search"
        ) from None
    if pruner != "none" and "step" not in groups:
        raise ValueError(
            f"patterns.{name} = {_shown(pattern)} has no group for the step, and study.pruner = "
            f'"{pruner}" compares trials after the same step: matches are counted anew when a '
            r"trial continues. HINT: '(?P<step>\d+)' where the line has the epoch"
        )


def _check_layouts(spec: StudySpec) -> None:
    """Raise ValueError for two parameters of a knob, or a layout that the ranks do not fit."""
    knobs = [parameter.knob for parameter in spec.parameters if parameter.knob]
    if twice := [knob for knob in knobs if knobs.count(knob) > 1]:
        raise ValueError(f"two parameters have the knob {twice[0]}. HINT: leave one of them out")
    exclude(dict.fromkeys(knobs))
    for parameter in spec.parameters:
        for text in parameter.choices if parameter.knob == LAYOUT_KNOB else ():
            try:
                Layout.parse(str(text)).over(spec.table.ranks)
            except ValueError as error:
                ranks = f"study.ranks = {spec.table.ranks}"
                raise ValueError(f"parameters.{parameter.name}, with {ranks}: {error}") from None


def _check_known(spec: StudySpec) -> None:
    by_name = {parameter.name: parameter for parameter in spec.parameters}
    for number, point in enumerate(spec.known, 1):
        where = f"point {number} of [[known]]"
        for name, value in point.items():
            if name not in by_name:
                near = nearest(name, by_name)
                hint = f" HINT: {near}" if near else ""
                raise ValueError(f"{where}: {name} is no parameter.{hint}")
            if not by_name[name].accepts(value):
                raise ValueError(
                    f"{where}: {name} = {value!r} is outside of {by_name[name].range_text}. HINT: "
                    f"change the point, or parameters.{name}"
                )
        for name in point:
            missing = [other for other in by_name[name].when if other not in point]
            if missing or not is_active(by_name[name], point):
                raise ValueError(
                    f"{where}: {name} has no meaning there, because of parameters.{name}.when. "
                    f"HINT: leave it out, or set {', '.join(by_name[name].when)}"
                )


def _check_budget(spec: StudySpec) -> None:
    """Raise ValueError for a budget that is smaller than one trial."""
    table = spec.table
    if len(spec.known) > table.trials:
        raise ValueError(
            f"study.trials = {table.trials} is less than the {counted(len(spec.known), 'point')} "
            f"of [[known]]. HINT: trials = {len(spec.known)} or more"
        )
    if table.total_epochs is not None:
        if table.epochs is None:
            raise ValueError(
                "study.total_epochs needs study.epochs, the epochs of one trial. HINT: add epochs"
            )
        if table.total_epochs < table.epochs:
            raise ValueError(
                f"study.total_epochs = {table.total_epochs} is smaller than one trial "
                f"(epochs = {table.epochs}). HINT: total_epochs = {table.epochs * table.trials}"
            )
    hours = table.minutes and table.minutes / 60
    for name, budget in (("minutes", hours), ("node_hours", table.node_hours)):
        if budget and table.trial_minutes and budget * 60 < table.trial_minutes:
            raise ValueError(
                f"study.{name} = {getattr(table, name):g} is smaller than one trial "
                f"(trial_minutes = {table.trial_minutes:g}). HINT: increase {name}"
            )
