"""``paceline scale --critical-batch``: options, and the steps from the request to the result."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .base import say
from .command import STDOUT, print_json
from .options import flag, value_option
from .study_jobs import OF_JOBS
from .study_outputs import OUTPUTS, StudyOutputs

if TYPE_CHECKING:
    from ...analyze.scaling.critical.critical_model import StoredCritical

CRITICAL = "Critical batch"
# Parameters of ``paceline scale`` that a measurement of the critical batch does not have
OF_STUDIES = {
    *("strong", "weak", "until", "precision", "efficiency", "oversubscribe", "beside", "compare"),
    *("layout", "submit", "only", *OF_JOBS, *OUTPUTS),
} - {"json", "html"}
DEFAULT_MULTIPLES, DEFAULT_SEEDS = "1,2,4,8", 3


@dataclass(frozen=True)
class CriticalOptions:
    """The options of a measurement, as typed."""

    critical: Annotated[
        bool,
        flag(
            "--critical-batch",
            "Measure up to which batch a training needs no more samples: short runs from the "
            "script's checkpoint with multiples of its batch, on one number of ranks (-n), "
            "compared after the same samples. The gradient noise scale of the same runs is printed "
            "with it.",
            panel=CRITICAL,
        ),
    ] = False
    multiples: Annotated[
        str | None,
        value_option(
            "Multiples of the batch. A multiple that does not fit into memory is accumulated "
            f"in parts, if world.distribute is used. Default: {DEFAULT_MULTIPLES}.",
            "K,K,...",
            panel=CRITICAL,
        ),
    ] = None
    tolerance: Annotated[
        str | None,
        value_option(
            "Difference of the smoothed loss up to which a batch is as good as the script's "
            "own. Default: 1%.",
            "PERCENT",
            panel=CRITICAL,
        ),
    ] = None
    rule: Annotated[
        str | None,
        value_option(
            "How the learning rate follows the batch: linear or sqrt. Default: sqrt for "
            "optimizers such as Adam, linear for SGD.",
            "RULE",
            panel=CRITICAL,
        ),
    ] = None

    def check_unused(self) -> None:
        """Raise ValueError for options that need ``--critical-batch``."""
        given = ("multiples", "tolerance", "rule")
        wrong = [name for name in given if getattr(self, name) is not None]
        if wrong:
            raise ValueError(
                f"--{wrong[0]} needs --critical-batch. HINT: paceline scale --critical-batch -n 2 "
                "SCRIPT"
            )

    def fields(self, sizes: str | None, seeds: int | None) -> dict[str, Any]:
        """Return the fields of a request. Raises ValueError.

        Args:
            sizes, seeds: Values of ``-n`` and ``--seeds``.
        """
        from ...study.scale.request import parse_precision

        text = self.multiples or DEFAULT_MULTIPLES
        words = [word.strip() for word in text.split(",")]
        if not all(re.fullmatch(r"[1-9]\d{0,2}", word) for word in words):
            raise ValueError(f"--multiples {text!r}: whole numbers. HINT: --multiples 1,2,4,8")
        multiples = sorted({1, *map(int, words)})
        if not 2 <= len(multiples) <= 16:
            raise ValueError(f"--multiples {text!r}: 1 and at most 15 others. HINT: 1,2,4,8")
        if self.rule not in (None, "linear", "sqrt"):
            raise ValueError(f"--rule {self.rule!r} must be linear or sqrt. HINT: --rule sqrt")
        if sizes is None or not re.fullmatch(r"[1-9]\d{0,6}", sizes.strip()):
            raise ValueError(
                f"--critical-batch needs one number of ranks; -n is {sizes or 'missing'}. "
                "HINT: -n 2"
            )
        try:
            tolerance = parse_precision(self.tolerance or "1%")
        except ValueError:
            raise ValueError(
                f"--tolerance {self.tolerance!r} is no share of the loss. HINT: 1% or 0.01"
            ) from None
        return {
            "ranks": int(sizes),
            "multiples": multiples,
            "tolerance": tolerance,
            "rule": self.rule or "",
            "seeds": seeds or DEFAULT_SEEDS,
        }


def check_given(given: dict[str, str]) -> None:
    """Raise ValueError for parameters that are not those of a measurement.

    given: Names and options that the user has typed, as of ``given_parameters``.
    """
    wrong = [shown for name, shown in given.items() if name in OF_STUDIES]
    if wrong:
        raise ValueError(
            f"{wrong[0]} is of scaling studies, not of the critical batch. HINT: leave it out; "
            "--json and --html write the result"
        )


def measure(folder: Path, minutes: float | None, outputs: StudyOutputs) -> bool:
    """Run what is missing of a measurement, and print the result; return whether it was whole.

    Raises:
        ValueError: It can't be measured, or has nothing that can be compared.
    """
    from ...study.scale.critical_study import run_critical

    ended = run_critical(folder, say, minutes)
    if not ended.interrupted or any(run.losses for run in ended.stored.runs):
        finish(ended.stored, outputs)
    return not ended.interrupted


def finish(stored: "StoredCritical", outputs: StudyOutputs) -> None:
    """Judge a measurement, print it, and write its files. Raises ValueError."""
    from ...analyze.scaling.critical.judgement import judge
    from ...report.numbers import finite
    from ...report.scaling import critical_report as report
    from ...report.terminal.draw import print_panel

    found = judge(stored)
    document = report.critical_document(stored, found)
    written = []
    if outputs.html is not None:
        from ...report.page.write_page import document_page, save

        data = report.critical_charts(stored, found)
        written.append(save(document_page(document, data), outputs.html))
    if outputs.json is not None:
        print_json(finite(report.critical_json(stored, found)), outputs.json, indent=1)
    else:
        print_panel(lambda _: document)
    for line in written:
        typer.echo(line, err=outputs.json == STDOUT)
