"""Replicas that have come apart: ranks whose parameters differ are named, with the layer.

Every EVERY exchanges of gradients, and at an epoch's first and last, each rank sums up the bits
of its parameters and all ranks compare one number. It is counted by the exchanges themselves,
which all ranks take part in, and never by steps, which a faulty script may take on some ranks
only. Only where they differ more is exchanged: which parameters, and by how much; differences
of rounding (other processors on some hosts) are a warning.

One comparison takes 0.5 to 2 ms in examples/digits.py on two ranks, 0.1 of it for the sums.
"""

import collections
import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder
from .nonfinite import named

EVERY = 200
ROUNDING = 16  # times a type's epsilon, of a parameter's largest element
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Whether the models are the same on all ranks."""

    def __init__(
        self, rank: int, size: int, mode: str, recorder: Recorder, models: list[nn.Module]
    ) -> None:
        self.rank, self.size, self.recorder, self.models = rank, size, recorder, models
        self.mode = mode
        self._exchanging = False
        self._exchanges = 0
        self._compared = 0  # exchanges at the last comparison
        self._due = True
        self._equal_at: int | None = None  # the step

    def exchanging(self, group: Any) -> None:
        """A backward reduces gradients over the ranks of ``group``."""
        if group is dist.group.WORLD:
            self._exchanging = True

    def after_backward(self) -> None:
        if not self._exchanging or self.mode == "ignore":
            return
        self._exchanging = False
        self._exchanges += 1
        if self._due or self._exchanges % EVERY == 0:
            self._compare()

    def new_epoch(self) -> None:
        self._due = True

    def end_of_epoch(self) -> None:
        if self._exchanges > self._compared and self.mode != "ignore":
            self._compare()

    def _compare(self) -> None:
        """Collective. Raises ValueError on all ranks where one differs."""
        self._due, self._compared = False, self._exchanges
        sums = [_bits(parameter) for _, parameter in named(self.models)]
        vector = torch.stack([one.cpu() for one in sums] if sums else [torch.zeros(())]).long()
        digest = hashlib.blake2b(vector.numpy().tobytes(), digest_size=8).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        digests = [int(row[0]) for row in self._gathered(own)]
        if len(set(digests)) == 1:
            self._equal_at = self.recorder.step
            return
        most = collections.Counter(digests).most_common()
        reference = digests[0] if digests.count(digests[0]) == most[0][1] else most[0][0]
        source = digests.index(reference)
        others = [rank for rank, digest in enumerate(digests) if digest != reference]
        self._tell(source, others, self._gathered(vector))

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        return rows

    def _tell(self, source: int, others: list[int], sums: list[torch.Tensor]) -> None:
        parameters = named(self.models)
        differ = [
            i
            for i in range(len(parameters))
            if any(int(sums[rank][i]) != int(sums[source][i]) for rank in others)
        ]
        by, rounding = self._distance([parameters[i][1] for i in differ], source)
        step = self.recorder.step
        who = _whose(others, source, self.size)
        before = (
            f" (at step {self._equal_at} they were equal)" if self._equal_at is not None else ""
        )
        name = parameters[differ[0]][0]
        if rounding:
            self.mode = "ignore"
            what = f"{who} in rounding (by up to {by:.1g}) at step {step}{before}, first in {name}"
            self._say(f"{what}. HINT: other processors or libraries on some hosts?")
            return
        what = f"{who} at step {step}{before}, first in {name}, by up to {by:.2g}. "
        what += (
            "HINT: look for what one rank does alone with the model or the optimizer (a step, "
            "load_state_dict, clipping by its own gradients); replicas='ignore' in paceline.init "
            "where they are meant to differ"
        )
        if self.mode == "raise":
            raise ValueError(what)
        self.mode = "ignore"
        self._say(what)

    def _say(self, what: str) -> None:
        if self.rank == 0:
            notify(f"paceline: warning: {what}\n")

    def _distance(self, parameters: list[nn.Parameter], source: int) -> tuple[float, bool]:
        """By how much any rank differs from rank ``source``, and whether that is rounding."""
        largest, rounding = 0.0, True
        for parameter in parameters:
            theirs = parameter.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(theirs, source)
            mine = parameter.detach()
            alike = (mine == theirs) | (mine.isnan() & theirs.isnan())
            by = (mine - theirs).abs().masked_fill_(alike, 0).max().double().cpu()
            scale = theirs.abs().max().double().cpu()
            both = self._gathered(torch.stack([by, scale]))
            furthest = max((float(row[0]) for row in both), key=lambda x: (math.isnan(x), x))
            epsilon = torch.finfo(parameter.dtype).eps
            # A comparison with nan is false: that is no rounding.
            near = furthest <= ROUNDING * epsilon * float(both[source][1])
            rounding = rounding and (near or furthest == 0)
            largest = furthest if not largest >= furthest else largest
        return largest, rounding


def _bits(parameter: nn.Parameter) -> torch.Tensor:
    """The sum of a parameter's bits as whole numbers: the same wherever the bits are."""
    tensor = parameter.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = tensor.is_contiguous() and tensor.nbytes % 8 == 0 and tensor.data_ptr() % 8 == 0
    if whole:  # ten times as fast as to widen each
        tensor = tensor.flatten().view(torch.int64)
    return tensor.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)


def _whose(ranks: list[int], source: int, size: int) -> str:
    said = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    whose = f"rank {said}'s parameters" if len(ranks) == 1 else f"the parameters of ranks {said}"
    others = f"rank {source}'s" if size - len(ranks) == 1 else "the other ranks'"
    return f"{whose} differ from {others}"
