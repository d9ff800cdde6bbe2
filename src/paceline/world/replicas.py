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
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.sharded_tensor import is_sharded
from ..comm.group_device import exchangeable
from ..comm.members.exchange_objects import all_gather_objects
from ..optim.whole_norms import local_part
from ..parallel.mesh import DATA, TENSOR, Mesh
from ..parallel.strategy.distributed_model import DistributedModel
from ..plurals import named_ranks
from ..record.pending_value import is_capturing
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder
from .nonfinite import owned_parameters

COMPARE_INTERVAL = 200
MAX_LOSS_DIFFERENCE = 1e-4  # relative, between ranks that share samples
MAX_ROUNDING_EPSILONS = 16  # times the dtype's epsilon and a parameter's largest element
_HINT = (
    "HINT: find code that only one rank runs on the model or the optimizer (a step, "
    "load_state_dict, clipping by local gradients), or set replicas='ignore' in "
    "paceline.init if the ranks are meant to differ"
)
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Gather = Callable[[torch.Tensor, Any], list[torch.Tensor]]
Named = list[tuple[str, nn.Parameter]]


class ReplicaDivergenceCheck:
    """Whether parameters are equal on the ranks that hold copies of them."""

    def __init__(
        self, mesh: Mesh, mode: str, recorder: Recorder, models: list[DistributedModel]
    ) -> None:
        self.mesh, self.recorder, self.models = mesh, recorder, models
        self.mode = mode
        self._exchanging = False
        self._exchanges = 0
        self._compared = 0  # number of exchanges at the last comparison
        self._due = True
        self._equal_at: int | None = None  # step of the last comparison without difference

    def _compare_shards(self) -> None:
        """Compare the shards that several ranks hold (such as shard_over="host"). Collective.

        Raises ValueError on all ranks where they differ.
        """
        for model in self.models:
            if not model.holds_copied_shards:
                continue
            held = [(n, p) for n, p in model.parameters().items() if is_sharded(p)]
            names = [name for name, _ in held]
            sums = _on_host([_bit_sum(local_part(shard)) for _, shard in held])
            copies = [(n, self.mesh.copies_of(p, model.parted_axes(n))) for n, p in held]
            own = torch.cat([_digest(repr(copies).encode()), sums])
            rows = [torch.tensor(row) for row in all_gather_objects(own.tolist(), list[int])]
            first = {int(row[0]): (rank, row) for rank, row in reversed([*enumerate(rows)])}
            for rank, row in enumerate(rows):
                source, reference = first[int(row[0])]
                at = (row != reference).nonzero().flatten().tolist()
                if at:
                    self._report_shard(names[at[0] - 1], rank, source)
                    return

    def _report_shard(self, name: str, rank: int, source: int) -> None:
        message = (
            f"{self.mesh.name(rank)}'s shard of {name} differs from {self.mesh.name(source)}'s "
            f"at step {self.recorder.step}, and both should be equal. {_HINT}"
        )
        if self.mode == "raise":
            raise ValueError(message)
        self.mode = "ignore"
        self._say(message)

    def note_exchange(self, group: Any) -> None:
        """Note that a backward reduces gradients over the ranks of ``group``."""
        # of sharded models every rank of the job takes part too, in its own group
        has_shards = any(model.is_sharded for model in self.models)
        if has_shards or group is self.mesh.data_group:
            self._exchanging = True

    def check_loss(self, loss: torch.Tensor) -> None:
        """Compare the losses of ranks that share samples and operators, when a comparison is due.

        Collective over them. Raises ValueError on all of them where they differ.
        """
        mesh = self.mesh
        is_divided = set(mesh.shape) == {DATA, TENSOR}
        if self.mode == "ignore" or not self._due or not is_divided or is_capturing():
            return
        own = loss.detach().double().reshape(1)
        values = [float(row) for row in self._gather(own, mesh.model_group)]
        largest = max(map(abs, values))
        if max(values) - min(values) > MAX_LOSS_DIFFERENCE * largest:
            ranks = named_ranks(mesh.sharing_samples)
            message = (
                f"the losses of {ranks}, which share samples, differ: {values[0]:.6g} and "
                f"{next(v for v in values if v != values[0]):.6g}. Code outside of the model uses "
                "a rank's part of a parameter as if it were whole, such as a sum over "
                "model.parameters(). HINT: compute it in the model's forward, where self.weight "
                "stands for the whole parameter, or use the optimizer's weight_decay"
            )
            if self.mode == "raise":
                raise ValueError(message)
            self._say(message)

    def after_backward(self) -> None:
        if self.mesh.is_divided:  # which groups exchange gradients is the layout's choice
            self._exchanging = True
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
        models = [model.local_sgd for model in self.models]
        if not any(local is not None and local.ranks_differ for local in models):
            self._compare()
            self._compare_shards()

    def _compare(self) -> None:
        """Compare the parameters of ranks that hold copies. Collective.

        Raises ValueError on all ranks where one differs.
        """
        self._due, self._compared = False, self._exchanges
        held = self._whole_parameters()
        sums = {axes: _on_host([_bit_sum(p) for _, p in of]).long() for axes, of in held.items()}
        digests = [_digest(vector.numpy().tobytes()) for vector in sums.values()]
        rows = self._gather(torch.cat(digests), None)
        if len(rows) == 1 or all(torch.equal(row, rows[0]) for row in rows[1:]):
            self._equal_at = self.recorder.step
            return
        for number, axes in enumerate(held):
            column = [int(row[number]) for row in rows]
            if any(self._differs(column, axes, rank) for rank in range(self.mesh.size)):
                self._report(axes, column, held[axes], sums[axes])
                return
        self._equal_at = self.recorder.step

    def _whole_parameters(self) -> dict[frozenset[str], Named]:
        """Return the parameters that are no shards, by the axes along which ranks hold copies.

        The axes are the same on all ranks; some may have no parameter.
        """
        axes = list(self.mesh.shape)
        inner = [axis for axis in axes if axis != DATA]
        parts = [frozenset(one) for n in range(len(inner) + 1) for one in combinations(inner, n)]
        found: dict[frozenset[str], Named] = {frozenset(axes) - one: [] for one in parts}
        for name, parameter, model, own_name in owned_parameters(self.models):
            if local_part(parameter) is parameter:
                parted = model.parted_axes(own_name)
                found[frozenset(axes) - parted].append((name, parameter))
        return found

    def _differs(self, digests: list[int], axes: frozenset[str], rank: int) -> bool:
        """Return whether a rank differs from one that should hold a copy."""
        return any(digests[one] != digests[rank] for one in self.mesh.ranks_along(axes, rank))

    def _gather(self, own: torch.Tensor, group: Any) -> list[torch.Tensor]:
        sent = exchangeable(own, group)
        rows = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, sent, group)
        return [row.to(own.device) for row in rows]

    def _report(
        self, axes: frozenset[str], digests: list[int], parameters: Named, sums: torch.Tensor
    ) -> None:
        """Say which parameters differ, and by how much. Collective; raises ValueError."""
        group = self.mesh.group(*axes)
        answer: tuple[str, bool] | None = None
        if self._differs(digests, axes, self.mesh.rank):
            answer = self._describe(axes, digests, parameters, sums, group)
        answers = [answer]
        if self.mesh.is_divided:
            answers = all_gather_objects(answer, tuple[str, bool] | None)
        message, rounding = next(one for one in answers if one is not None)
        if self.mode == "raise" and not rounding:
            raise ValueError(message)
        self.mode = "ignore"
        self._say(message)

    def _describe(
        self,
        axes: frozenset[str],
        digests: list[int],
        parameters: Named,
        sums: torch.Tensor,
        group: Any,
    ) -> tuple[str, bool]:
        """Return a message, and whether only the rounding differs. Collective in the group."""
        ranks = sorted(self.mesh.ranks_along(axes))
        own = [digests[rank] for rank in ranks]
        counts = collections.Counter(own).most_common()
        reference = own[0] if own.count(own[0]) == counts[0][1] else counts[0][0]
        source = own.index(reference)
        others = [i for i, digest in enumerate(own) if digest != reference]
        rows = self._gather(sums, group)
        differing = [
            i
            for i in range(len(parameters))
            if any(int(rows[one][i]) != int(rows[source][i]) for one in others)
        ]
        found = [parameters[i][1] for i in differing]
        difference, rounding = _max_difference(found, source, group, self._gather)
        step = self.recorder.step
        ranks_text = self._ranks_text([ranks[i] for i in others], ranks[source], len(ranks))
        before = (
            f" (at step {self._equal_at} they were equal)" if self._equal_at is not None else ""
        )
        name = parameters[differing[0]][0]
        if rounding:
            message = (
                f"{ranks_text} in rounding (by up to {difference:.1g}) at step {step}{before}, "
                f"first in {name}"
            )
            hint = "HINT: use the same processors and libraries on all nodes"
            return f"{message}. {hint}", True
        message = f"{ranks_text} at step {step}{before}, first in {name}, by up to "
        return f"{message}{difference:.2g}. {_HINT}", False

    def _ranks_text(self, ranks: list[int], source: int, size: int) -> str:
        named = self.mesh.named(ranks)
        owners = f"{named}'s parameters" if len(ranks) == 1 else f"the parameters of {named}"
        others = f"{self.mesh.name(source)}'s" if size - len(ranks) == 1 else "the other ranks'"
        return f"{owners} differ from {others}"

    def _say(self, what: str) -> None:
        if self.mesh.rank == 0:
            notify(f"paceline: warning: {what}\n")


def _max_difference(
    parameters: list[nn.Parameter], source: int, group: Any, gather: Gather
) -> tuple[float, bool]:
    """Return the largest difference of any rank from one of the group, and whether it is rounding.

    Args:
        source: This rank's number in the group.
    """
    largest, rounding = 0.0, True
    for parameter in parameters:
        reference = parameter.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(reference, dist.get_global_rank(group, source), group)
        own = parameter.detach()
        is_equal = (own == reference) | (own.isnan() & reference.isnan())
        difference = (own - reference).abs().masked_fill_(is_equal, 0).max().double().cpu()
        scale = reference.abs().max().double().cpu()
        gathered = gather(torch.stack([difference, scale]), group)
        max_difference = max((float(row[0]) for row in gathered), key=lambda x: (math.isnan(x), x))
        epsilon = torch.finfo(parameter.dtype).eps
        # A comparison with nan is false: nan is not rounding.
        is_rounding = max_difference <= MAX_ROUNDING_EPSILONS * epsilon * float(gathered[source][1])
        rounding = rounding and (is_rounding or max_difference == 0)
        largest = max_difference if not largest >= max_difference else largest
    return largest, rounding


def _digest(content: bytes) -> torch.Tensor:
    """Return a digest as a tensor of one element."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


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
    if not numbers:
        return torch.zeros(0, dtype=torch.int64)
    device = numbers[0].device
    return torch.stack([number.to(device) for number in numbers]).cpu()
