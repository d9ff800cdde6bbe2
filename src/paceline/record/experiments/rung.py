"""What is switched off, and when, in a run of ``paceline diagnose``: one phase after another.

    everything     nothing
    cached         a loader's batches come from memory
    channels-last  as cached, and convolutions have their weights and images in that layout
    silent         as cached, and a collective moves nothing
    one thread     as silent, and every rank computes with one thread
    loader         batches are asked for, and nothing else happens

``climber`` carries it out in a rank's process."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

RUNG_VARIABLE = "PACELINE_RUNG"
EVERYTHING, CACHED, SILENT, LOADER = "everything", "cached", "silent", "loader"
ONE_THREAD, CHANNELS_LAST = "one thread", "channels-last"


@dataclass(frozen=True)
class Rung:
    """Each phase has ``warm`` optimizer steps and then ``steps`` that are measured. scratch: a
    folder for what the script writes. losses: the mean loss of the measured steps is told."""

    warm: int
    steps: int
    phases: tuple[str, ...]
    scratch: str = ""
    losses: bool = False

    def at(self, step: int) -> int:
        """The number of the phase that a step is in; as many as there are: it is over."""
        return min(step // (self.warm + self.steps), len(self.phases))

    def measures(self, step: int) -> bool:
        """Whether a step is one of those that are measured, and not of the warm-up."""
        return step % (self.warm + self.steps) >= self.warm

    def first(self, phase: str) -> int:
        """The first step that is measured of a phase."""
        return self.phases.index(phase) * (self.warm + self.steps) + self.warm

    def variable(self) -> str:
        """As an environment variable holds it."""
        return json.dumps(asdict(self))


def rung_of_process(environment: Mapping[str, str] = os.environ) -> Rung | None:
    """That of this process, if it is in such a run."""
    text = environment.get(RUNG_VARIABLE)
    if not text:
        return None
    told = json.loads(text)
    return Rung(**told | {"phases": tuple(told["phases"])})
