"""Observe the training of this process for ``paceline verify``, and end it."""

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ..experiments.protect_files import FileProtection
from ..experiments.survey_end import SurveyEnd
from ..ring.launcher_messages import notify, send_to_launcher
from .facts import StepFacts
from .loaders import Loaders
from .models import Models
from .observation import Observation
from .settings import VerifySettings
from .steps import Steps

WAIT_FOR_RANKS_S = 5.0  # at the end, so that no rank loses a peer inside of a collective


class TrainingObserver:
    """All hooks of ``paceline verify`` in one process.

    Args:
        settings: Those of the run.
    """

    def __init__(self, settings: VerifySettings) -> None:
        self.settings = settings
        self.observation = Observation(settings)
        self.models = Models(self.observation)
        self.steps = Steps(self.observation, self.models)
        self.loaders = Loaders(self.observation, self._end)
        self._survey_end = SurveyEnd(Path(settings.folder), 0.0)
        self._protection: FileProtection | None = None

    def install(self) -> None:
        """Install the hooks. Must follow those of the recorder."""
        if self.settings.scratch:
            self._protection = FileProtection(
                Path(self.settings.scratch), self._stop, self.settings.covered
            )
            self._protection.install()
        self.models.install()
        self.steps.install()
        self.loaders.install()
        self.steps.on_backward.append(self.loaders.note_backward)
        self.steps.after_step.append(self._after_step)

    def _after_step(self, optimizer: Any, step: StepFacts) -> None:
        self.loaders.note_step()
        if self.observation.step >= self.settings.steps:
            self._end()

    def script_ended(self) -> None:
        """Write the facts at the end of the script."""
        self.observation.finish("error" if hasattr(sys, "last_value") else "script")

    def _stop(self, why: str) -> NoReturn:
        """End the run because the script is about to change a file of the user."""
        self.observation.add_unseen(f"the run was stopped: {why}")
        notify(f"paceline: the run stops: {why}\n")
        self._end()

    def _end(self) -> NoReturn:
        """Write the facts, and end this process without exit handlers."""
        if self._protection is not None:
            self._protection.is_disabled = True
        self.observation.finish("limit")
        sys.stdout.flush()
        sys.stderr.flush()
        self._wait_for_ranks()
        send_to_launcher(finished=0)
        os._exit(0)

    def _wait_for_ranks(self) -> None:
        """Wait until the facts of all ranks are written, or some seconds."""
        folder, size = Path(self.settings.folder), self.observation.facts.size
        deadline = time.monotonic() + WAIT_FOR_RANKS_S
        while time.monotonic() < deadline:
            if all((folder / f"facts-{rank}.json").exists() for rank in range(size)):
                return
            time.sleep(0.02)


