"""Begin, continue and fork a study: its journal, its folder of trials, and who runs it.

Beside ``NAME.toml`` lie ``NAME.journal`` and ``NAME.trials``. A fork is a further Optuna study in
the same journal, ``NAME-2``, with a folder of its own.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...plurals import counted
from ..study_folder import locked_study
from .journal import open_journal
from .parameters import is_active
from .searches.checkpointed import POPULATION
from .searches.search import KNOWN
from .study_file import MAX, StudySpec, changes
from .trial_folder import TrialFolder

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

IDENTITY = "paceline:study"
COPIED = "paceline:copied"  # number of the trial in the study that was forked
FORKED_FROM = "paceline:forked_from"  # name of that study; "" if there is none
MAX_CHANGES_SHOWN = 5
_TRIAL = re.compile(r"\d{5,}")  # name of a trial's folder
# Keys that say what a value of a trial means: with another one, trials can't be compared.
MEANING = ("command", "function", "metric", "goal", "value", "repeats", "epochs")


@dataclass(frozen=True)
class OpenStudy:
    """A study, its file and its folder."""

    spec: StudySpec
    study: "Study"
    journal: Path
    folder: Path

    def trial(self, number: int) -> TrialFolder:
        """Return the folder of a trial."""
        return TrialFolder(self.folder / f"{number:05}")


def journal_of(spec: StudySpec) -> Path:
    return spec.path.absolute().with_suffix(".journal")


def folder_of(spec: StudySpec, name: str) -> Path:
    return spec.path.absolute().with_name(f"{name}.trials")


def locked(spec: StudySpec, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Be the only runner of a study. Raises ValueError that names the other one."""
    folder = folder_of(spec, spec.name)
    folder.mkdir(parents=True, exist_ok=True)
    return locked_study(folder, say)


def read_study(spec: StudySpec) -> OpenStudy:
    """Return the last study of the file, for reading. Raises ValueError if there is none."""
    journal = journal_of(spec)
    if not journal.exists():
        raise ValueError(
            f"{spec.path} has no study yet: there is no {journal.name}. HINT: paceline tune "
            f"{spec.path}"
        )
    _, opened = _last_study(spec, writes=False)
    if opened is None:
        raise ValueError(f"{journal} has no study {spec.name}")
    return opened


def begin_study(spec: StudySpec, say: Callable[[str], None]) -> OpenStudy:
    """Begin a study; the caller holds the lock. Raises ValueError if there is one."""
    storage, opened = _last_study(spec)
    if opened is None:
        return _create(spec, storage, spec.name)
    count = len(opened.study.get_trials(deepcopy=False))
    if not count:  # it was killed before its first trial
        return continue_study(spec, say)
    raise ValueError(
        f"{spec.path} has a study already, with {counted(count, 'trial')} in "
        f"{opened.journal.name}. HINT: paceline tune {spec.path} --continue, or --fork"
    )


def continue_study(spec: StudySpec, say: Callable[[str], None]) -> OpenStudy:
    """Continue the last study of the file; the caller holds the lock.

    A changed file begins a new study if no trial of the old one has ended.

    Raises:
        ValueError: There is no study, or the file has changed.
    """
    read_study(spec)
    storage, opened = _last_study(spec)
    assert opened is not None
    found = _changes(opened)
    if not found:
        _resume(opened, storage)
        return opened
    ended = [trial for trial in opened.study.get_trials(deepcopy=False) if _has_value(trial)]
    if ended:
        more = f", and {len(found) - MAX_CHANGES_SHOWN} more" * (len(found) > MAX_CHANGES_SHOWN)
        raise ValueError(
            f"{spec.path} has changed since the study was begun: "
            f"{'; '.join(found[:MAX_CHANGES_SHOWN])}{more}. HINT: paceline tune {spec.path} --fork "
            "begins a new study, with the trials that still fit; or undo the changes"
        )
    say(f"{spec.path} has changed, and no trial had a value: a new study begins")
    return fork_study(spec, say)


def fork_study(spec: StudySpec, say: Callable[[str], None]) -> OpenStudy:
    """Begin a new study in the same journal, with the trials of the last one that still fit."""
    read_study(spec)
    storage, old = _last_study(spec)
    assert old is not None
    last = old.study.study_name
    number = int(last.removeprefix(spec.name).lstrip("-") or 1) + 1
    while _is_taken(spec, f"{spec.name}-{number}"):
        number += 1
    opened = _create(spec, storage, f"{spec.name}-{number}")
    if not _same_meaning(old.study.user_attrs.get(IDENTITY, {}), spec.identity):
        say(
            f"the study {opened.study.study_name} begins without the trials of {last}: "
            "with another command, metric or pruner they can't be compared"
        )
        return opened
    copied = sum(COPIED in trial.user_attrs for trial in opened.study.get_trials(deepcopy=False))
    say(
        f"the study {opened.study.study_name} begins with {copied} of "
        f"{counted(len(_complete(old.study)), 'complete trial')} of {last}"
    )
    return opened


def _is_taken(spec: StudySpec, name: str) -> bool:
    """Return whether a study file of this name, or a folder of trials, exists."""
    return folder_of(spec, name).exists() or spec.path.absolute().with_name(f"{name}.toml").exists()


def _changes(opened: OpenStudy) -> list[str]:
    """Return the differences between the file and the study, one sentence each."""
    identity, spec = opened.study.user_attrs.get(IDENTITY), opened.spec
    if identity is not None:
        return changes(identity, spec.identity)
    # its runner was killed before it had stored more than the goals
    same = opened.study.directions == _directions(spec)
    return [] if same else ["study.goal or study.metric has changed"]


def _complete(study: "Study") -> "list[FrozenTrial]":
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]


def _same_meaning(old: dict[str, Any], new: dict[str, Any]) -> bool:
    if old.get("patterns") != new.get("patterns"):
        return False
    if POPULATION in (old.get("study", {}).get("pruner"), new["study"].get("pruner")):
        return False  # its trials are parts of trainings
    return all(old.get("study", {}).get(key) == new["study"].get(key) for key in MEANING)


def _copy(opened: OpenStudy, trial: "FrozenTrial") -> None:
    """Copy a complete trial if it is a point of the study."""
    from optuna.trial import create_trial

    spec, values = opened.spec, dict(trial.params)
    active = [parameter for parameter in spec.parameters if is_active(parameter, values)]
    if {parameter.name for parameter in active} != set(values):
        return
    if not all(parameter.accepts(values[parameter.name]) for parameter in active):
        return
    opened.study.add_trial(
        create_trial(
            values=list(trial.values),
            params=values,
            distributions={parameter.name: parameter.distribution() for parameter in active},
            intermediate_values=dict(trial.intermediate_values),
            user_attrs={**trial.user_attrs, COPIED: trial.number},
        )
    )


def _has_value(trial: "FrozenTrial") -> bool:
    return trial.state.name in ("COMPLETE", "PRUNED") or bool(trial.intermediate_values)


def _last_study(spec: StudySpec, writes: bool = True) -> "tuple[JournalStorage, OpenStudy | None]":
    """Open the journal; return it with the newest study of this file, if there is one."""
    storage = open_journal(journal_of(spec), writes)
    names = _names(spec, storage)
    return storage, _opened(spec, storage, names[0]) if names else None


def _names(spec: StudySpec, storage: "JournalStorage") -> list[str]:
    """Return the names of the studies of this file in the journal, the newest one first."""
    pattern = re.compile(re.escape(spec.name) + r"(?:-(\d{1,6}))?")
    found = {}
    for summary in storage.get_all_studies():
        if match := pattern.fullmatch(summary.study_name):
            found[int(match[1] or 1)] = summary.study_name
    return [found[number] for number in sorted(found, reverse=True)]


def _directions(spec: StudySpec) -> list[Any]:
    import optuna

    kinds = optuna.study.StudyDirection
    return [kinds.MAXIMIZE if goal == MAX else kinds.MINIMIZE for goal in spec.goals]


def _create(spec: StudySpec, storage: "JournalStorage", name: str) -> OpenStudy:
    """Create a study. Raises ValueError if its folder has trials of another one."""
    import optuna

    folder = folder_of(spec, name)
    if folder.is_dir() and any(_TRIAL.fullmatch(path.name) for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has trials of a study that is not in {journal_of(spec).name}; new trials "
            f"would continue from their checkpoints. HINT: move it away: mv {folder} "
            f"{folder.with_suffix('.old')}; or restore the journal"
        )
    optuna.create_study(storage=storage, study_name=name, directions=_directions(spec))
    opened = _opened(spec, storage, name)
    _resume(opened, storage)
    return opened


def _resume(opened: OpenStudy, storage: "JournalStorage") -> None:
    """Store what a runner that was killed at the beginning had not stored yet."""
    study, spec = opened.study, opened.spec
    if FORKED_FROM not in study.user_attrs:
        names = _names(spec, storage)
        before = names[names.index(study.study_name) + 1 :]
        study.set_user_attr(FORKED_FROM, before[0] if before else "")
    if IDENTITY not in study.user_attrs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental
            study.set_metric_names(list(spec.metrics))
        study.set_user_attr(IDENTITY, spec.identity)
    source = study.user_attrs[FORKED_FROM]
    if source in _names(spec, storage):  # not removed by another program
        _copy_missing(opened, _opened(spec, storage, source).study)
    trials = study.get_trials(deepcopy=False)
    for number, point in enumerate(spec.known, 1):
        if not any(_is_known(trial, number, point) for trial in trials):
            study.enqueue_trial(dict(point), user_attrs={KNOWN: number})
    opened.folder.mkdir(parents=True, exist_ok=True)


def _copy_missing(opened: OpenStudy, source: "Study") -> None:
    """Copy the complete trials that still fit, and were not copied before the runner was killed."""
    if not _same_meaning(source.user_attrs.get(IDENTITY, {}), opened.spec.identity):
        return
    there = {trial.user_attrs.get(COPIED) for trial in opened.study.get_trials(deepcopy=False)}
    for trial in _complete(source):
        if trial.number not in there:
            _copy(opened, trial)


def _is_known(trial: "FrozenTrial", number: int, point: dict[str, Any]) -> bool:
    """Return whether a trial is a known point, of this study or of the one that was forked."""
    if COPIED not in trial.user_attrs:
        return bool(trial.user_attrs.get(KNOWN) == number)
    if KNOWN not in trial.user_attrs:  # a point that leaves out parameters is not any such trial
        return dict(trial.params) == point
    return all(name in trial.params and trial.params[name] == point[name] for name in point)


def _opened(spec: StudySpec, storage: "JournalStorage", name: str) -> OpenStudy:
    import optuna

    study = optuna.load_study(study_name=name, storage=storage)
    return OpenStudy(spec, study, journal_of(spec), folder_of(spec, name))
