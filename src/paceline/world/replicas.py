"""Detection of replicas that have diverged: ranks whose parameters differ, and the layer.

Every COMPARE_INTERVAL gradient exchanges, and at the first and last of an epoch, each rank sums the
bits of its parameters and all ranks compare one number. Exchanges are counted because all ranks
take part in them; a faulty script may take steps on some ranks only. If ranks differ, they also
exchange which parameters differ, and by how much. Differences of rounding (different processors on
some nodes) are a warning.

One comparison takes 0.5 to 2 ms in examples/digits.py on two ranks, 0.1 ms of it for the sums.
"""

import collections
import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.group_device import exchangeable
from ..optim.local_sgd import local_sgd_of
from ..optim.whole_norms import local_part
from ..parallel.sharded.registry import sharded_of
from ..plurals import named_ranks
from ..record.pending_value import is_capturing
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder
from .nonfinite import named_parameters

COMPARE_INTERVAL = 200
MAX_ROUNDING_EPSILONS = 16  # times the dtype's epsilon and a parameter's largest element
_HINT = (
    "HINT: find code that only one rank runs on the model or the optimizer (a step, "
    "load_state_dict, clipping by local gradients), or set replicas='ignore' in "
    "paceline.init if the ranks are meant to differ"
)
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaDivergenceCheck:
    """Whether the models are the same on all ranks."""

    def __init__(
        self, rank: int, size: int, mode: str, recorder: Recorder, models: list[nn.Module]
    ) -> None:
        self.rank, self.size, self.recorder, self.models = rank, size, recorder, models
        self.mode = mode
        self._exchanging = False
        self._exchanges = 0
        self._compared = 0  # number of exchanges at the last comparison
        self._due = True
        self._equal_at: int | None = None  # step of the last comparison without difference

    def _compare_shards(self) -> None:
        """Compare the shards that several hosts hold (shard_over="host"). Collective.

        Raises ValueError on all ranks where they differ.
        """
        for model in self.models:
            sharded = sharded_of(model)
            if sharded is None or not sharded.is_replicated:
                continue
            names = list(sharded.shards)
            sums = _on_host([_bit_sum(local_part(shard)) for shard in sharded.shards.values()])
            index = torch.tensor([sharded.shard_index()])
            rows = self._gather(torch.cat([index, sums]))
            first = {int(row[0]): (rank, row) for rank, row in reversed([*enumerate(rows)])}
            for rank, row in enumerate(rows):
                source, reference = first[int(row[0])]
                at = (row != reference).nonzero().flatten().tolist()
                if at:
                    self._report_shard(names[at[0] - 1], rank, source)
                    return

    def _report_shard(self, name: str, rank: int, source: int) -> None:
        message = (
            f"rank {rank}'s shard of {name} differs from rank {source}'s at step "
            f"{self.recorder.step}, and both should be equal with shard_over='host'. {_HINT}"
        )
        if self.mode == "raise":
            raise ValueError(message)
        self.mode = "ignore"
        self._say(message)

    def note_exchange(self, group: Any) -> None:
        """Note that a backward reduces gradients over the ranks of ``group``."""
        # of sharded models every rank of the job takes part too, in its own group
        is_sharded = any(sharded_of(model) is not None for model in self.models)
        if group is dist.group.WORLD or is_sharded:
            self._exchanging = True

    def after_backward(self) -> None:
        if not self._exchanging or self.mode == "ignore" or is_capturing():
            return
        self._exchanging = False
        self._exchanges += 1
        if self._due or self._exchanges % COMPARE_INTERVAL == 0:
            self._compare_if_equal()

    def new_epoch(self) -> None:
        self._due = True

    def end_of_epoch(self) -> None:
        if self._exchanges > self._compared and self.mode != "ignore":
            self._compare_if_equal()

    def _compare_if_equal(self) -> None:
        """Compare the ranks' parameters, unless local SGD lets them differ until their average."""
        models = [local_sgd_of(model) for model in self.models]
        if not any(local is not None and local.ranks_differ for local in models):
            self._compare()
            self._compare_shards()

    def _compare(self) -> None:
        """Compare the ranks' parameters. Collective; raises ValueError on all ranks where one
        differs.
        """
        self._due, self._compared = False, self._exchanges
        parameters = self._compared_parameters()
        sums = [_bit_sum(parameter) for _, parameter in parameters]
        vector = _on_host(sums or [torch.zeros(())]).long()
        digest = hashlib.blake2b(vector.numpy().tobytes(), digest_size=8).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        digests = [int(row[0]) for row in self._gather(own)]
        if len(set(digests)) == 1:
            self._equal_at = self.recorder.step
            return
        counts = collections.Counter(digests).most_common()
        reference = digests[0] if digests.count(digests[0]) == counts[0][1] else counts[0][0]
        source = digests.index(reference)
        others = [rank for rank, digest in enumerate(digests) if digest != reference]
        self._report(source, others, self._gather(vector))

    def _compared_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that every rank holds whole; shards differ by design."""
        return [(n, p) for n, p in named_parameters(self.models) if local_part(p) is p]

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        sent = exchangeable(own)
        rows = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(rows, sent)
        return [row.to(own.device) for row in rows]

    def _report(self, source: int, others: list[int], sums: list[torch.Tensor]) -> None:
        parameters = self._compared_parameters()
        differing = [
            i
            for i in range(len(parameters))
            if any(int(sums[rank][i]) != int(sums[source][i]) for rank in others)
        ]
        difference, rounding = self._max_difference([parameters[i][1] for i in differing], source)
        step = self.recorder.step
        ranks_text = _ranks_text(others, source, self.size)
        before = (
            f" (at step {self._equal_at} they were equal)" if self._equal_at is not None else ""
        )
        name = parameters[differing[0]][0]
        if rounding:
            self.mode = "ignore"
            message = (
                f"{ranks_text} in rounding (by up to {difference:.1g}) at step {step}{before}, "
                f"first in {name}"
            )
            self._say(f"{message}. HINT: use the same processors and libraries on all nodes")
            return
        message = (
            f"{ranks_text} at step {step}{before}, first in {name}, by up to {difference:.2g}. "
        )
        message += _HINT
        if self.mode == "raise":
            raise ValueError(message)
        self.mode = "ignore"
        self._say(message)

    def _say(self, what: str) -> None:
        if self.rank == 0:
            notify(f"paceline: warning: {what}\n")

    def _max_difference(self, parameters: list[nn.Parameter], source: int) -> tuple[float, bool]:
        """Return the largest difference of any rank from rank ``source``, and whether it is
        rounding.
        """
        largest, rounding = 0.0, True
        for parameter in parameters:
            reference = parameter.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(reference, source)
            own = parameter.detach()
            is_equal = (own == reference) | (own.isnan() & reference.isnan())
            difference = (own - reference).abs().masked_fill_(is_equal, 0).max().double().cpu()
            scale = reference.abs().max().double().cpu()
            gathered = self._gather(torch.stack([difference, scale]))
            max_difference = max(
                (float(row[0]) for row in gathered), key=lambda x: (math.isnan(x), x)
            )
            epsilon = torch.finfo(parameter.dtype).eps
            # A comparison with nan is false: nan is not rounding.
            is_rounding = max_difference <= MAX_ROUNDING_EPSILONS * epsilon * float(
                gathered[source][1]
            )
            rounding = rounding and (is_rounding or max_difference == 0)
            largest = max_difference if not largest >= max_difference else largest
        return largest, rounding


def _bit_sum(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sum of a parameter's bits as integers: equal wherever the bits are."""
    tensor = parameter.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = tensor.is_contiguous() and tensor.nbytes % 8 == 0 and tensor.data_ptr() % 8 == 0
    if whole:  # ten times as fast as widening each element
        tensor = tensor.flatten().view(torch.int64)
    return tensor.view(_INTEGER_DTYPES[tensor.element_size()]).sum(dtype=torch.int64)


def _on_host(numbers: list[torch.Tensor]) -> torch.Tensor:
    """Return the numbers as a vector on the host, with one copy from a GPU."""
    device = numbers[0].device
    return torch.stack([number.to(device) for number in numbers]).cpu()


def _ranks_text(ranks: list[int], source: int, size: int) -> str:
    named = named_ranks(ranks)
    owners = f"{named}'s parameters" if len(ranks) == 1 else f"the parameters of {named}"
    others = f"rank {source}'s" if size - len(ranks) == 1 else "the other ranks'"
    return f"{owners} differ from {others}"
