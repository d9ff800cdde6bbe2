"""What the runner of a study tells whoever shows it."""

from .tuning_view import TrialRow, TuningView


class TuneListener:
    """Receives what happens while a study runs. Does nothing itself."""

    def study_started(self, view: TuningView) -> None:
        """The study begins or is continued."""

    def trial_started(self, row: TrialRow, view: TuningView) -> None:
        """A trial was started, promoted or repeated."""

    def trial_ended(self, row: TrialRow, view: TuningView) -> None:
        """A trial ended or paused."""

    def progress(self, view: TuningView) -> None:
        """A trial has reported a value."""

    def message(self, text: str) -> None:
        """Something that the user should know."""

    def study_ended(self, view: TuningView) -> None:
        """The study is complete or interrupted."""
