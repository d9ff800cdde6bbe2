"""The description of one experiment of ``paceline diagnose``.

``paceline diagnose`` runs the script several times, each time with other parts of the training
switched off. These experiments are called the rungs of a ladder: the difference between two
neighbouring rungs is the cost of the part that only one of them has. One run of the script can hold
several rungs, called phases here, one after another:

    everything     nothing is switched off
    cached         the loader's batches come from memory
    channels-last  as cached, with convolution weights and images in that memory format
    silent         as cached, and collectives move no data
    one thread     as silent, and every rank computes with one thread
    loader         batches are fetched, and nothing else happens

``experiment.py`` carries the phases out in a rank's process.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

RUNG_VARIABLE = "PACELINE_RUNG"  # environment variable that holds Rung.to_json()
OVERLAY_NAME = "paceline-diagnose"  # of the mounts that cover the user's folders
EVERYTHING, CACHED, SILENT, LOADER = "everything", "cached", "silent", "loader"
ONE_THREAD, CHANNELS_LAST = "one thread", "channels-last"


@dataclass(frozen=True)
class Rung:
    """The phases of one run of the script.

    Attributes:
        warm: Optimizer steps at the beginning of each phase that are not measured.
        steps: Optimizer steps of each phase that are measured after them.
        phases: Names of the phases, in order.
        scratch: Folder for the files that the script writes.
        losses: Whether to report the mean loss of the measured steps.
        survey_until: When to end the survey, in s of ``time.monotonic``: the unchanged training
            goes on after the last phase until then, or until it is past its first epoch. 0: no
            survey.
        covered: Folders of the user that an overlay covers, so that they need no other protection.
    """

    warm: int
    steps: int
    phases: tuple[str, ...]
    scratch: str = ""
    losses: bool = False
    survey_until: float = 0.0
    covered: tuple[str, ...] = ()

    def phase_index(self, step: int) -> int:
        """Return the index of the phase of a step; the number of phases once all are over."""
        return min(step // (self.warm + self.steps), len(self.phases))

    def measures(self, step: int) -> bool:
        """Return whether a step is measured, and not part of a warm-up."""
        return step % (self.warm + self.steps) >= self.warm

    def first_measured_step(self, phase: str) -> int:
        """Return the first step of a phase that is measured."""
        return self.phases.index(phase) * (self.warm + self.steps) + self.warm

    def to_json(self) -> str:
        """Return the value of the environment variable ``RUNG_VARIABLE``."""
        return json.dumps(asdict(self))


def rung_of_process(environment: Mapping[str, str] = os.environ) -> Rung | None:
    """Return the experiment that this process is part of; None if it is part of none."""
    text = environment.get(RUNG_VARIABLE)
    if not text:
        return None
    fields = json.loads(text)
    return Rung(**fields | {name: tuple(fields[name]) for name in ("phases", "covered")})
