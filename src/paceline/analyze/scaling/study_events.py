"""What a running study reports to those who show it: methods that do nothing unless replaced."""

from dataclasses import dataclass

from .study_model import ScalingStudy, Setup, StudyRun


@dataclass(frozen=True)
class Progress:
    """How far a study is.

    Attributes:
        elapsed_s: Seconds since the command started.
        left_s: Estimated seconds until the study ends; None if nothing is known yet.
        runs_done: Runs that ended.
        runs_left: Estimated number of runs that follow.
    """

    elapsed_s: float = 0.0
    left_s: float | None = None
    runs_done: int = 0
    runs_left: int | None = None


class StudyListener:
    """Receives what happens, in the thread that runs the study."""

    def study_started(self, study: ScalingStudy, progress: Progress) -> None:
        """Report the request, how the batch is set, and the points, before the first repeat."""

    def run_started(self, setup: Setup, repeat: int, expected_s: float, progress: Progress) -> None:
        """Report a run that starts now; ``expected_s``: its estimated duration, 0 if unknown."""

    def run_ended(self, run: StudyRun, study: ScalingStudy, progress: Progress) -> None:
        """Report a run that ended, with figures or a failure, and the study with this run."""

    def message(self, text: str) -> None:
        """Report something that the user should know now."""

    def study_ended(self, study: ScalingStudy, progress: Progress) -> None:
        """Report the study at its end; also after Ctrl-C."""
