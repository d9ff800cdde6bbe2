"""The description of one experiment of ``paceline diagnose``.

``paceline diagnose`` runs the script several times, each time with other parts of the training
switched off. These experiments are called the rungs of a ladder: the difference between two
neighbouring rungs is the cost of the part that only one of them has. One run of the script can hold
several rungs, called phases here, one after another:

    everything     nothing is switched off
    cached         the loader's batches come from memory
    silent         as cached, and collectives move no data
    one thread     as silent, and every rank computes with one thread
    loader         batches are fetched, and nothing else happens
    float32        a script that computes in float64 computes in float32, from its start on

A switched phase tests a hypothesis: a part is off in some blocks of its steps and on in the others
(of channels-last, the contiguous memory format).

    no garbage collection   Python's garbage collector is off
    other threads paused    the script's other Python threads do not run
    no buffer broadcasts    DDP does not broadcast the model's buffers
    channels-last           as cached, with convolution weights and images in that memory format

``experiment.py`` carries the phases out in a rank's process.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

RUNG_VARIABLE = "PACELINE_RUNG"  # environment variable that holds Rung.to_json()
EVERYTHING, CACHED, SILENT, LOADER = "everything", "cached", "silent", "loader"
ONE_THREAD, CHANNELS_LAST = "one thread", "channels-last"
NO_COLLECTION, THREADS_PAUSED = "no garbage collection", "other threads paused"
NO_BROADCASTS = "no buffer broadcasts"
SINGLE_PRECISION = "float32"
SWITCHED = (NO_COLLECTION, THREADS_PAUSED, NO_BROADCASTS, CHANNELS_LAST)
# Whether the part is off, by block. A machine that slows down steadily affects both alike.
PATTERN = (False, True, True, False)
BLOCKS = ((64, 16), (32, 8), (8, 4), (0, 2))  # number of blocks from this number of steps on
# Steps whose operators are profiled: not used, used, and only to see later uses of results.
PROFILE_WARM_UP, PROFILE_USED, PROFILE_LATER = 1, 3, 1
PROFILED_STEPS = PROFILE_WARM_UP + PROFILE_USED + PROFILE_LATER


@dataclass(frozen=True)
class Rung:
    """The phases of one run of the script.

    Attributes:
        warm: Optimizer steps at the beginning of each phase that are not measured.
        steps: Optimizer steps of each phase that are measured after them.
        phases: Names of the phases, in order.
        scratch: Folder for the checkpoints of ``world.epochs``, which all ranks of a node share.
        losses: Whether to report the mean loss of the measured steps.
        profiles: Whether to profile the operators of ``PROFILED_STEPS`` steps after the last phase,
            which is not ``loader``.
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
    profiles: bool = False
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

    def is_off(self, step: int) -> bool:
        """Return whether the part that a switched phase tests is off in a step."""
        at = step % (self.warm + self.steps) - self.warm
        block = at // self._block_steps if at >= 0 else -1
        return 0 <= block < self._blocks and PATTERN[block % len(PATTERN)]

    def switched_pairs(self, phase: str) -> list[tuple[list[int], list[int]]]:
        """Return the steps of each two neighbouring blocks of a switched phase: on, and off.

        The first step after a change is in neither of them, if blocks have several steps.
        """
        first, length = self.first_measured_step(phase), self._block_steps
        pairs: list[tuple[list[int], list[int]]] = []
        for start in range(first, first + self._blocks * length, 2 * length):
            steps: tuple[list[int], list[int]] = ([], [])
            for step in range(start, start + 2 * length):
                if length == 1 or self.is_off(step) == self.is_off(step - 1):
                    steps[self.is_off(step)].append(step)
            pairs.append(steps)
        return pairs

    @property
    def _blocks(self) -> int:
        return next(blocks for least, blocks in BLOCKS if self.steps >= least)

    @property
    def _block_steps(self) -> int:
        return max(self.steps // self._blocks, 1)

    def to_json(self) -> str:
        """Return the value of the environment variable ``RUNG_VARIABLE``."""
        return msgspec.json.encode(self).decode()


def rung_of_process(environment: Mapping[str, str] = os.environ) -> Rung | None:
    """Return the experiment that this process is part of; None if it is part of none."""
    text = environment.get(RUNG_VARIABLE)
    return msgspec.json.decode(text, type=Rung) if text else None
