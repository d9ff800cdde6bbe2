"""Observe the training of this process for ``paceline verify``, and end it."""

import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ..record.experiments.protect_files import KEPT_FILES_HINT, FileProtection
from ..record.experiments.protected_run import SurveyEnd
from ..record.ring.launcher_messages import notify, send_to_launcher
from .facts.steps import StepFacts
from .observation import Observation
from .optimization.models import Models, ShardedModels
from .optimization.steps import Losses, Steps
from .outputs import Collectives, Files, LoggedMetrics, Outputs, Restores
from .random_draws import Draws, Seeds
from .replays.replay import Replay
from .replays.stored_run import StoredRun
from .samples.inputs import Inputs
from .samples.loaders import LightningEpochs, Loaders
from .settings import VerifySettings
from .states_of_script import Averages, ChangeLines, Norms, OwnTensors, Schedules
from .tracers import OperatorTrace

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
        self.draws = Draws(self.observation, self.loaders)
        self.losses = Losses(self.observation)
        self.schedules = Schedules(self.observation, self.steps)
        self._limit: SurveyEnd | None = None
        self.averages = Averages(self.observation, self.models)
        self.tensors = OwnTensors(self.observation, self.models)
        self._protection = FileProtection(self._stop, settings.covered, settings.folder)

    def install(self) -> None:
        """Install the hooks. Must follow those of the recorder."""
        self._protection.install()
        self.models.install()
        if self.settings.replays:
            replay = Replay(self.observation, self.steps, self.loaders, self._end)
            replay.install()
            self.models.before_first.append(replay.set_initial)
            self.loaders.replace = replay.iterator
        if self.settings.traces:
            OperatorTrace(self.observation, self._end).install()
        self.steps.install()
        self.loaders.install()
        LightningEpochs(self.observation, self.loaders).install()
        ShardedModels(self.observation, self.models).install()
        self.draws.install()
        self.losses.install()
        self.schedules.install()
        Collectives(self.observation).install()
        Seeds(self.observation).install()
        Outputs(self.observation).install()
        LoggedMetrics(self.observation).install()
        Files(self.observation, self.models).install()
        Restores(self.observation).install()
        if self.settings.keeps_mib:
            stored = StoredRun(self.observation)
            self.models.before_first.append(stored.add_initial)
            self.loaders.on_batch.append(stored.add_batch)
        self.models.on_wrapping.append(self.draws.end_construction)
        self.steps.on_optimizer.append(self.draws.end_construction)
        inputs = Inputs(self.observation, self.models, self.loaders)
        norms = Norms(self.observation, self.models)
        self.models.before_forward += [inputs.before_forward, self.draws.before_forward]
        self.models.before_forward.append(norms.before_forward)
        self.models.after_forward += [self.draws.after_forward, self.losses.note_output]
        self.loaders.on_batch.append(self.draws.after_batch)
        self.loaders.before_pass += [self.averages.note, self.tensors.note]
        self.steps.on_backward += [self.loaders.note_backward, self.draws.before_backward]
        ends = [self.schedules.complete, self.averages.note, self.tensors.note]
        self.observation.before_end += ends
        self._observe_changes()
        self.steps.after_step.append(self._after_step)

    def _observe_changes(self) -> None:
        """Look for the lines that change gradients and parameters."""
        changes = ChangeLines(self.observation, self.steps, self.averages, self.tensors)
        self.steps.after_backward.append(changes.after_backward)
        self.steps.after_step.append(lambda optimizer, step: changes.after_step())
        self.steps.before_step.insert(0, changes.stop)
        self.steps.on_backward.insert(0, changes.stop)
        self.models.before_forward.insert(0, changes.stop)
        self.loaders.before_fetch.append(changes.stop)
        self.loaders.on_batch.append(lambda opened, number, batch: changes.after_batch())

    def _after_step(self, optimizer: Any, step: StepFacts) -> None:
        self.loaders.note_step()
        count = self.observation.step
        if self._limit is None:
            until_s = time.monotonic() + self.settings.seconds
            self._limit = SurveyEnd(Path(self.settings.folder), until_s)
        if count < self.settings.steps:
            return
        if self._limit.is_over(count, math.inf, count < self.settings.max_steps):
            self._end()

    def script_ended(self) -> None:
        """Write the facts at the end of the script."""
        self.observation.finish("error" if hasattr(sys, "last_value") else "script")

    def _stop(self, why: str) -> NoReturn:
        """End the run because the script is about to change a file of the user."""
        self.observation.add_unseen(f"the run was stopped: {why}. HINT: {KEPT_FILES_HINT}")
        notify(f"paceline: the run stops: {why}\n")
        self._end()

    def _end(self) -> NoReturn:
        """Write the facts, and end this process without exit handlers."""
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
