"""``paceline tune``: begin, continue or fork a study, and run it."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...launch.job import Job, check, preloads
from ...launch.options import NodeOptions
from ...report.tuning.tuning_view import TuneListener, TuningView
from .journal import check_installed, full_disk_in_words
from .machine import find_machine
from .open_study import OpenStudy, begin_study, continue_study, fork_study, locked, read_study
from .runner import Runner, environment_is_clean
from .searches.registry import check_search, make_search, search_class
from .study_file import StudySpec, read_study_file
from .study_view import read_view
from .trial_server import TrialServer


@dataclass(frozen=True)
class TuneOptions:
    """What the user asks for.

    Attributes:
        continued, forked: Whether to continue the study, or to begin a fork.
        minutes: Time budget, instead of that of the file.
        nodes: The options that choose the nodes.
        stage: Absolute paths of the packed datasets to stage.
    """

    continued: bool = False
    forked: bool = False
    minutes: float | None = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    stage: Sequence[str] = ()


@dataclass(frozen=True)
class TuneEnd:
    """How ``tune`` ended: the study, and whether it is complete."""

    view: TuningView
    is_complete: bool


def load_spec(path: Path) -> StudySpec:
    """Read a study file, and check that its search exists. Raises ValueError, OSError."""
    check_installed()
    if path.suffix != ".toml":
        raise ValueError(
            f"{path} is no study file: its name must end in .toml. HINT: write a "
            f'study file with command = "{path.name} ..." and the parameters: '
            "docs/how-to/improve/tune.md"
        )
    spec = read_study_file(path)
    try:
        check_search(spec)
    except ValueError as mistake:
        raise ValueError(f"{path}: {mistake}") from None
    return spec


def show_study(path: Path) -> tuple[OpenStudy, TuningView]:
    """Return the last study of a file as it is in the journal. Raises ValueError, OSError."""
    opened = read_study(load_spec(path))
    return opened, read_view(opened)


def tune(
    path: Path, options: TuneOptions, listener: TuneListener, interrupted: Callable[[], bool]
) -> TuneEnd:
    """Run a study.

    Args:
        path: The study file.
        options: What the user asks for.
        listener: Receives what happens.
        interrupted: Returns whether the user asks to end.

    Raises:
        ValueError: The study can't be run, or can't go on.
        OSError: A file can't be read.
    """
    environment_is_clean()
    spec = load_spec(path)
    machine = find_machine(options.nodes, spec.table.cores)
    for ranks in search_class(spec).numbers_of_ranks(spec):
        machine.check(ranks)
    with contextlib.chdir(spec.folder):
        modules = _check_script(spec)
    with full_disk_in_words(spec.path), locked(spec, listener.message):
        server = TrialServer(modules)
        begin = continue_study if options.continued else begin_study
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Optuna calls experimental
                opened = (fork_study if options.forked else begin)(spec, listener.message)
                runner = Runner(
                    opened,
                    make_search(opened.study, spec),
                    machine,
                    server,
                    listener,
                    options.minutes or spec.table.minutes,
                    interrupted,
                    options.stage,
                )
                complete = runner.run()
            return TuneEnd(read_view(opened, with_importances=complete), complete)
        finally:
            server.close()


def _check_script(spec: StudySpec) -> list[str]:
    """Return the modules to import once for all trials. Raises ValueError: there is no script."""
    words = spec.words({parameter.name: parameter.example for parameter in spec.parameters}, {})
    if spec.command.function:
        where = spec.command.function.rpartition(":")[0]
        words = [where] if where.endswith(".py") else ["-m", where]
    is_module = words[0] == "-m"
    job = Job(name=words[is_module], module=is_module)
    return preloads(job, check(job))
