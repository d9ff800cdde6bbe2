"""The optimizer steps of a job, joined from the messages of its ranks."""

import math
from collections import deque
from dataclasses import dataclass, field

from .rows import Row

MAX_BEHIND = 256  # steps that a rank may be behind before the others' values are used without it
MAX_KEPT = 4096  # last steps that are kept to explain a divergence


@dataclass(frozen=True)
class JobStep:
    """One step of all ranks.

    Attributes:
        samples: Samples of all ranks until its end; 0 if they are not known.
        loss: Mean over ranks, weighted by their samples; nan if it is not known.
        losses: Of each rank that is known.
        rate, norm: Learning rate, and largest gradient norm of a rank; nan if not known.
        bits: Checksum of the parameters of each rank that has sent one.
    """

    step: int
    samples: int
    loss: float
    losses: dict[int, float]
    rate: float
    norm: float
    bits: dict[int, int]


@dataclass
class JobSteps:
    """Joins the rows of ``ranks`` ranks to steps.

    Attributes:
        kept: The last steps.
    """

    ranks: int
    kept: deque[JobStep] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    _rows: dict[int, dict[int, Row]] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # samples of each rank
    _last: int = -1

    def add(self, rank: int, rows: list[Row]) -> list[JobStep]:
        """Add rows of a rank; return the steps that are complete now, in their order."""
        for row in rows:
            if row[0] > self._last:
                self._rows.setdefault(row[0], {})[rank] = row
        newest = max(self._rows, default=0)
        complete = []
        for step in sorted(self._rows):
            of_step = self._rows[step]
            if len(of_step) < self.ranks and step > newest - MAX_BEHIND:
                break
            del self._rows[step]
            self._last = step
            complete.append(self._join(step, of_step))
        self.kept.extend(complete)
        return complete

    def finish(self) -> list[JobStep]:
        """Return the steps that some ranks have not sent, at the end of the job."""
        rest = [self._join(step, rows) for step, rows in sorted(self._rows.items())]
        self._rows = {}
        self.kept.extend(rest)
        return rest

    def reset(self) -> None:
        """Forget the steps of an attempt that has ended; the job may repeat some."""
        self._rows, self._seen, self._last = {}, {}, -1

    def _join(self, step: int, rows: dict[int, Row]) -> JobStep:
        for rank, row in rows.items():
            self._seen[rank] = row[1]
        is_counted = all(row[2] > 0 for row in rows.values())
        losses = {rank: row[3] for rank, row in rows.items() if row[3] is not None}
        weights = {rank: rows[rank][2] if is_counted else 1 for rank in losses}
        total = sum(weights.values())
        mean = sum(weights[rank] * loss for rank, loss in losses.items()) / total if total else None
        norms = [row[5] for row in rows.values() if row[5] is not None]
        rates = [row[4] for row in rows.values() if row[4] is not None]
        return JobStep(
            step,
            sum(self._seen.values()),
            mean if mean is not None else math.nan,
            losses,
            rates[0] if rates else math.nan,
            max(norms, key=lambda norm: (math.isnan(norm), norm)) if norms else math.nan,
            {rank: row[6] for rank, row in rows.items() if row[6] is not None},
        )
