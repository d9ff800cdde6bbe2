"""The options of the guard of the loss: --reference, --metric, --make-reference."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from ...analyze.reference.metric import parse_goal
from ...launch.guard.request import Action, GuardRequest, parse_metric
from .base import exit_on_mistake, say
from .command import can_be_written
from .options import MakeReference, MetricOption, OnDivergence, References, Seeds, Until

DEFAULT_SEEDS = 3


@dataclass(frozen=True)
class GuardOptions:
    """What the loss of a job is held against, and when the job ends."""

    reference: References = None
    metric: MetricOption = None
    on_divergence: OnDivergence = Action.TELL
    until: Until = None
    make_reference: MakeReference = None
    seeds: Seeds = None

    def request(self, record: Path | None) -> GuardRequest | None:
        """Return what the guard is to do, or None.

        Args:
            record: Folder of ``--record``, which gets the values of the metric; or None.

        Raises:
            ValueError: The options do not fit together.
        """
        metric, action = self.metric, self.on_divergence
        parse_metric(metric)
        if not self.reference and action is not Action.TELL:
            raise ValueError(
                f"--on-divergence {action.value} needs a reference. HINT: add --reference FILE"
            )
        goal = None
        if self.until is not None:
            if self.reference:
                raise ValueError(
                    "--until and --reference can't be used together. HINT: leave out --reference"
                )
            goal = parse_goal(self.until, metric)
            metric = metric if metric is not None else goal.name
        elif not self.reference and (metric is None or record is None):
            return None
        save = None
        if record is not None:
            from ...analyze.reference.reference_file import RECORD_FILE

            save = str((record / RECORD_FILE).absolute())
        names = [str(path) for path in self.reference or []]
        return GuardRequest(names, metric, action, save, goal)

    def reference_file(self, ranks: int | None, record: Path | None) -> Path | None:
        """Return the file that ``--make-reference`` writes, or None.

        Raises:
            ValueError: The options do not fit together, or the file can't be written.
        """
        if self.make_reference is None:
            if self.seeds is not None:
                raise ValueError("--seeds is for --make-reference. HINT: --make-reference FILE")
            return None
        if self.until is not None:
            raise ValueError(
                "--until and --make-reference can't be used together: a reference is trained "
                "to its end. HINT: leave out --until"
            )
        return check_reference_options(self.make_reference, self.reference, ranks, record)


def check_reference_options(
    file: Path, references: list[Path] | None, ranks: int | None, record: Path | None
) -> Path:
    """Check the options of ``--make-reference``; return the file that is written.

    Args:
        file: The file, or a folder that gets it: --reference accepts both.

    Raises:
        ValueError: They do not fit together, or the file can't be written.
    """
    if references:
        raise ValueError(
            "--make-reference and --reference can't be used together. HINT: make the reference "
            "first, then run the job with --reference"
        )
    if ranks not in (None, 1):
        raise ValueError(
            f"-n {ranks}: a reference is trained on one rank. HINT: leave out -n, and give the "
            "script the global batch size"
        )
    if record is not None:
        raise ValueError(
            "--make-reference records nothing else. HINT: leave out --record, or use "
            "--record DIR --metric backward and --reference DIR"
        )
    if file.is_dir():
        from ...analyze.reference.reference_file import RECORD_FILE

        file /= RECORD_FILE
    can_be_written(file, "--make-reference")
    return file


def run_reference(
    file: Path, words: list[str], metric: str | None, seeds: int | None, options: list[str]
) -> NoReturn:
    """Make a reference and end the process.

    Args:
        words: The script and its arguments.
        options: Other options of ``paceline run``.
    """
    from ...study.make_reference import ReferenceRequest, make_reference

    with exit_on_mistake():
        request = ReferenceRequest(words, metric, seeds or DEFAULT_SEEDS, options)
        try:
            code = make_reference(request, file, lambda text: typer.echo(text, err=True))
        except KeyboardInterrupt:
            say("interrupted: no reference was written")
            code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
