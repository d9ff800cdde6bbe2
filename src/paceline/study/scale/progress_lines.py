"""The progress of a scaling study on standard error: one line for each run."""

import sys

from ...analyze.scaling.study_events import Progress, StudyListener
from ...analyze.scaling.study_model import ScalingStudy, Setup, StudyRun
from ...plurals import counted
from ...security.text import printable


class ProgressLines(StudyListener):
    """Prints what happens."""

    def study_started(self, study: ScalingStudy, progress: Progress) -> None:
        sizes = ", ".join(map(str, study.request.sizes))
        kinds = " and ".join(dict.fromkeys(point.kind for point in study.points))
        self.message(f"{kinds} scaling on {sizes} ranks{_left(progress)}")

    def run_started(self, setup: Setup, repeat: int, expected_s: float, progress: Progress) -> None:
        self.message(
            f"{counted(setup.ranks, 'rank')}, global batch {setup.global_batch}, run {repeat + 1}"
            f"{_left(progress)}"
        )

    def run_ended(self, run: StudyRun, study: ScalingStudy, progress: Progress) -> None:
        if run.figures is None:
            self.message(f"{counted(run.setup.ranks, 'rank')} failed: {run.failure}")

    def message(self, text: str) -> None:
        sys.stderr.write(f"paceline: {printable(text)}\n")
        sys.stderr.flush()


def _left(progress: Progress) -> str:
    if progress.left_s is None:
        return ""
    left = round(progress.left_s)
    return f" (about {left // 60}:{left % 60:02d} left)"
