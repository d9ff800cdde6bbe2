"""Checks of a training: losses and gradients that are not finite, and replicas that differ."""

import collections
import hashlib
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.sharded_tensor import is_sharded
from ..comm.group_device import exchangeable
from ..comm.members.exchange_objects import all_gather_objects
from ..optim.whole_norms import local_part
from ..parallel.mesh import DATA, TENSOR, Mesh
from ..parallel.strategy.distributed_model import DistributedModel
from ..plurals import named_ranks
from ..record.pending_value import PendingCopy, is_capturing
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder

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
MODES = ("raise", "warn", "ignore")
MAX_WARNINGS = 5  # of one rank
_NO_STEP_TAKEN = (
    "No optimizer has stepped with it; the parameters and the last checkpoint are valid."
)


# Detection of losses and gradients that are not finite, by rank, step and layer.
#
# A loss is checked before its backward, and gradients where DDP is about to average them:
# afterwards they are not finite on any rank, and the rank that caused it is unknown. On a CPU the
# error is therefore raised before any rank has stepped. On a GPU nothing waits for the device:
# results are copied to the host asynchronously, and read when the next backward begins, before a
# checkpoint, and at an epoch's end. Steps that loss scaling skips are not an error, so gradients
# are not checked there.
#
# A check is one sum over what is exchanged: 0.1 % of a step of examples/digits.py. Without an
# exchange it is the norm of each gradient before the step: 0.6 %.


def validate_mode(option: str, value: str) -> str:
    """Return ``value`` if it is one of MODES. Raises ValueError otherwise."""
    if value not in MODES:
        raise ValueError(
            f"paceline.init: {option} must be one of {', '.join(map(repr, MODES))}; "
            f"this is {value!r}. HINT: {option}={MODES[0]!r}"
        )
    return value


class FiniteCheck:
    """The checks of one rank's losses and gradients."""

    def __init__(
        self, mesh: Mesh, mode: str, recorder: Recorder, models: list[DistributedModel]
    ) -> None:
        self.mesh, self.mode, self.recorder, self.models = mesh, mode, recorder, models
        self.check_gradients = True  # False with loss scaling
        # whether this step's gradients were checked before their exchange
        self._was_checked = False
        self._loss: PendingCopy | None = None
        self._exchanged: list[PendingCopy] = []
        self._layers: tuple[PendingCopy, list[str]] | None = None
        self._step = 0  # step of the pending flags
        self._warnings = 0
        self._parameter_orders: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}

    def check_loss(self, loss: torch.Tensor) -> torch.Tensor | float:
        """Return the loss as a number; on a GPU as a tensor, without synchronization."""
        if self.mode == "ignore":
            return loss.detach()
        if loss.device.type != "cpu":
            detached = loss.detach()
            if not is_capturing():
                self.report_pending()
                self._step = self.recorder.step
                self._loss = PendingCopy(torch.isfinite(detached))
            return detached
        value = float(loss.item())
        if not math.isfinite(value):
            where = f"on {self.mesh.name()} at step {self.recorder.step}"
            self._report(f"the loss is {value} {where}. {_NO_STEP_TAKEN}")
        return value

    def check_before_exchange(self, tensors: Any) -> None:
        """Check this rank's gradients just before they are averaged."""
        if not self.check_gradients or self.mode == "ignore" or is_capturing():
            return
        self._was_checked = self._was_checked or bool(tensors)
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.is_sparse or not tensor.numel():
                continue
            if tensor.device.type != "cpu":
                self._exchanged.append(PendingCopy(finite_flags([tensor.detach()])))
                continue
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = tensor.detach().sum(dtype=wide)
            if not math.isfinite(float(total)) and not bool(torch.isfinite(tensor).all()):
                self._report_gradient(f"on {self.mesh.name()}", tensor)

    def check_before_step(self, optimizer: Optimizer) -> None:
        """Check the gradients that the optimizer is about to step with."""
        was_checked, self._was_checked = self._was_checked, False
        on_device = bool(self._exchanged) or self._loss is not None
        if not self.check_gradients or self.mode == "ignore" or (was_checked and not on_device):
            return
        if is_capturing():
            return
        found = [
            (name, _values(parameter.grad))
            for name, parameter in self._named_parameters(optimizer)
            if parameter.grad is not None and _values(parameter.grad).numel()
        ]
        if not found:
            return
        gradients = [gradient for _, gradient in found]
        if on_device:
            names = [name for name, _ in found]
            self._layers = (PendingCopy(finite_flags(gradients)), names)
            return
        norms = torch.stack([n.float() for n in torch._foreach_norm(gradients)])
        # a norm may be infinite where the gradient is not
        if not math.isfinite(float(norms.sum())) and not bool(finite_flags(gradients).all()):
            where = (
                "after the average over ranks"
                if any(model.is_distributed for model in self.models)
                else f"on {self.mesh.name()}"
            )
            self._report_gradient(where)

    def report_pending(self) -> None:
        """On a GPU: report what was not finite in the previous step."""
        loss, exchanged, layers = self._loss, self._exchanged, self._layers
        self._loss, self._exchanged, self._layers = None, [], None
        where = f"on {self.mesh.name()} at step {self._step}. The last checkpoint is older."
        if loss is not None and not bool(loss.wait().all()):
            self._report(f"the loss was not finite {where}")
        elif not all(bool(flag.wait().all()) for flag in exchanged) or (layers and not exchanged):
            names = _false_names(*layers) if layers else []
            if names or exchanged:
                self._report(f"the gradient{_gradient_owner(names)} was not finite {where}")

    def _named_parameters(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters in the order in which backward reaches most of them."""
        key = (id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups))
        if key not in self._parameter_orders:
            names = {id(p): name for name, p in named_parameters(self.models)}
            groups = [p for group in optimizer.param_groups for p in group["params"]]
            self._parameter_orders[key] = [
                (names.get(id(p), "a parameter"), p) for p in reversed(groups)
            ]
        return self._parameter_orders[key]

    def _report_gradient(self, where: str, exchanged: torch.Tensor | None = None) -> None:
        names = [
            name
            for name, parameter in reversed(named_parameters(self.models))
            if parameter.grad is not None
            and not bool(torch.isfinite(_values(parameter.grad)).all())
        ]
        if exchanged is not None:
            names = [n for model in self.models for n in model.name_nonfinite(exchanged)] or names
        step = self.recorder.step
        self._report(
            f"the gradient{_gradient_owner(names)} is not finite {where} at step {step}. "
            f"{_NO_STEP_TAKEN}"
        )

    def _report(self, what: str) -> None:
        if self.mode == "raise":
            raise ValueError(
                f"{what} HINT: lower the learning rate, add a warm-up, set clip=1.0 in world.step, "
                "or check the samples of this batch"
            )
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            what = what.replace(f" {_NO_STEP_TAKEN}", "")
            last = (
                " This rank prints no further warnings of this kind."
                if self._warnings == MAX_WARNINGS
                else ""
            )
            notify(f"paceline: warning: {what}{last}\n")


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient; of a sparse one the stored values."""
    part = local_part(gradient)
    return part._values() if part.is_sparse else part


def finite_flags(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether each tensor is finite, as booleans on the device of the first one.

    The largest absolute value is not finite only where an element is not: sums and norms may
    overflow. No tensor is empty.
    """
    largest = list(torch._foreach_norm(tensors, float("inf")))
    first = largest[0]
    if all((norm.device, norm.dtype) == (first.device, first.dtype) for norm in largest):
        return torch.stack(largest).isfinite()
    return torch.stack([norm.isfinite().to(first.device) for norm in largest])


def _false_names(flags: PendingCopy, names: list[str]) -> list[str]:
    return [name for name, well in zip(names, flags.wait().tolist(), strict=True) if not well]


def named_parameters(models: list[DistributedModel]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the models train, with the names that the script uses for them."""
    return [(name, parameter) for name, parameter, _, _ in owned_parameters(models)]


def owned_parameters(
    models: list[DistributedModel],
) -> list[tuple[str, nn.Parameter, DistributedModel, str]]:
    """Return ``named_parameters``, each with its model and its name there."""
    found = []
    for i, model in enumerate(models):
        prefix = f"model {i + 1}'s " if len(models) > 1 else ""
        left_out = model.ignored_parameters
        for name, parameter in model.parameters().items():
            if parameter.requires_grad and name not in left_out:
                found.append((prefix + name, parameter, model, name))
    return found


def _gradient_owner(names: list[str]) -> str:
    """Name the first parameter that backward reached; later ones have inherited its values."""
    others = len(names) - 1
    others_text = f" (and of {others} more, which the backward reaches later)" if others > 0 else ""
    return f" of {names[0]}{others_text}" if names else ""


# Detection of replicas that have diverged: ranks whose parameters differ, and the layer.
#
# Every COMPARE_INTERVAL gradient exchanges, and at the first and last of an epoch, each rank sums
# the bits of its parameters and all ranks compare one number. Exchanges are counted because all
# ranks take part in them; a faulty script may take steps on some ranks only. If ranks differ, they
# also exchange which parameters differ, and by how much. Differences of rounding (different
# processors on some nodes) are a warning.
#
# One comparison takes 0.5 to 2 ms in examples/digits.py on two ranks, 0.1 ms of it for the sums.


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
        sums = {
            axes: _on_host([_bit_sum(p) for _, p in each]).long() for axes, each in held.items()
        }
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
        parts = [frozenset(part) for n in range(len(inner) + 1) for part in combinations(inner, n)]
        found: dict[frozenset[str], Named] = {frozenset(axes) - part: [] for part in parts}
        for name, parameter, model, own_name in owned_parameters(self.models):
            if local_part(parameter) is parameter:
                parted = model.parted_axes(own_name)
                found[frozenset(axes) - parted].append((name, parameter))
        return found

    def _differs(self, digests: list[int], axes: frozenset[str], rank: int) -> bool:
        """Return whether a rank differs from one that should hold a copy."""
        return any(digests[copy] != digests[rank] for copy in self.mesh.ranks_along(axes, rank))

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
        message, rounding = next(answer for answer in answers if answer is not None)
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
            if any(int(rows[other][i]) != int(rows[source][i]) for other in others)
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
