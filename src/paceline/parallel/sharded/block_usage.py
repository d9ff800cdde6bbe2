"""Blocks and parameters that ranks use differently in one step: branches, mixtures of experts.

FSDP gathers a block when the rank's forward reaches it, and reduces only those gradients that the
rank's backward has computed. Nothing compares the ranks: two blocks of the same size that meet in
one collective are exchanged in silence.

- **Parameters** of a block: each rank reduces the whole block, with zeros for parameters that got
  no gradient on this rank. A parameter that no rank has used has no gradient, as in one process.
- **Blocks**: a rank counts its gathers and reductions. At the end of each backward that reduces
  gradients all ranks compare them, in one all-reduce of a few bytes, and raise an error.
"""

import functools
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ...comm.group_device import exchangeable
from ...comm.members.exchange_objects import all_gather_objects
from ...record.hooks.sharded.block_labels import whole_gradient
from ...record.rank_places import placed_ranks
from ..blocks import WITHOUT_FORWARD

MAX_KEPT_CALLS = 4096  # gathers and reductions that an error can name
GATHERED, REDUCED = "gathers", "reduces"
_KINDS = (GATHERED, REDUCED)


def groups_of(state: Any) -> list[FSDPParamGroup]:
    """Return the groups of parameters of an FSDP state; before PyTorch 2.12 it has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class BlockUsage:
    """The gathers and reductions of one model on this rank since the ranks were compared.

    Args:
        model: The model.
        states: FSDP's states of its modules.
        names: By the id of a shard, the parameter's name in the plain model.
        ranks: The process group that shares the model; None: all.
    """

    def __init__(
        self, model: nn.Module, states: Sequence[Any], names: dict[int, str], ranks: Any = None
    ) -> None:
        self._model, self._names, self._ranks = model, names, ranks
        self._groups = [group for state in states for group in groups_of(state)]
        parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._parameters = parameters
        self._calls, self._digest = array("l"), 0
        self.discard_gradients()
        for number, group in enumerate(self._groups):
            group.unshard = self._counted(group.unshard, number, group)  # type: ignore[method-assign]
            group.post_backward = self._filled(group.post_backward, number, group)  # type: ignore[method-assign]
        for state in states:
            end = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = self._compared(end)

    def discard_gradients(self) -> None:
        """Forget which parameters have a gradient."""
        self._used = [False] * len(self._parameters)
        self._zero_filled: list[
            Any
        ] = []  # parameters without a gradient but the zeros of this rank

    def _counted(self, unshard: Callable[..., None], number: int, group: Any) -> Any:
        """Return ``unshard`` of a block, whose gathers are counted."""

        @functools.wraps(unshard)
        def gather(*args: Any, **options: Any) -> None:
            before = group._all_gather_result
            unshard(*args, **options)
            if group._all_gather_result is not before:
                self._count(number, GATHERED)

        return gather

    def _filled(self, post_backward: Callable[..., None], number: int, group: Any) -> Any:
        """Return ``post_backward`` of a block, which reduces all its gradients or none."""

        @functools.wraps(post_backward)
        def reduce(*args: Any) -> None:
            if group.reduce_grads and self._fill(group):
                self._count(number, REDUCED)
            post_backward(*args)

        return reduce

    def _fill(self, group: Any) -> bool:
        """Complete a block's gradients with zeros; return whether the block is reduced."""
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        gradients = [whole_gradient(parameter) for parameter in trained]
        like = next((gradient for gradient in gradients if gradient is not None), None)
        if like is None and not group.is_unsharded:
            return False  # the block did not run
        is_accumulated = any(p.unsharded_accumulated_grad is not None for p in trained)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                self._used[self._index[id(parameter)]] = True
                continue
            if parameter.sharded_param.grad is None:
                self._zero_filled.append(parameter)
            whole = parameter.unsharded_param
            zeros = torch.zeros_like(whole, dtype=whole.dtype if like is None else like.dtype)
            if is_accumulated:
                parameter.unsharded_accumulated_grad = zeros
            else:
                whole.grad = zeros
        return bool(trained)

    def _compared(self, end: Callable[[], None]) -> Callable[[], None]:
        """Return FSDP's callback at the end of a backward, after which the ranks are compared."""

        @functools.wraps(end)
        def callback() -> None:
            end()
            # the same on all ranks: gradients of an accumulation may wait for its last backward
            if all(group.reduce_grads and group.all_reduce_grads for group in self._groups):
                self._compare()

        return callback

    def _count(self, number: int, kind: str) -> None:
        if len(self._calls) == MAX_KEPT_CALLS:
            self._digest = zlib.crc32(self._calls.tobytes(), self._digest)
            del self._calls[:]
        self._calls.append(number * len(_KINDS) + _KINDS.index(kind))

    def _compare(self) -> None:
        """Compare the blocks, and discard gradients of which no rank has any part. Collective.

        Raises:
            ValueError: The ranks have gathered or reduced different blocks.
        """
        digest = zlib.crc32(self._calls.tobytes(), self._digest)
        used = torch.tensor([digest, -digest, *self._used])
        used = exchangeable(used, self._ranks)  # on the CPU if possible
        with torch.no_grad():
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._ranks)
        highest, lowest, *is_used = used.tolist()
        if highest != -lowest:
            raise ValueError(self._describe_difference())
        for parameter in self._zero_filled:
            if not is_used[self._index[id(parameter)]]:
                parameter.sharded_param.grad = None
        del self._calls[:]
        self._digest = 0
        self.discard_gradients()

    def _describe_difference(self) -> str:
        """Return which ranks have used which block, and the way out. Collective."""
        rows = all_gather_objects(self._calls.tolist(), list[int], self._ranks)
        place = next(self._differing_places(rows), 0)
        sides: dict[str, list[int]] = {}
        blocks = []
        ranks = dist.get_process_group_ranks(self._ranks or dist.group.WORLD)
        for rank, row in zip(ranks, rows, strict=True):
            block, kind = divmod(row[place], len(_KINDS)) if place < len(row) else (-1, 0)
            what = f"{_KINDS[kind]} {self._describe(block)}" if block >= 0 else "runs no block"
            sides.setdefault(what, []).append(rank)
            blocks += [block] if block >= 0 else []
        shown = ", ".join(f"{placed_ranks(ranks)} {what}" for what, ranks in sides.items())
        # inner blocks are those that a rank may leave out
        names = [str(self._groups[block]._module_fqn or "") for block in blocks]
        inner = max(names, key=lambda name: name.count(".") + bool(name), default="")
        return (
            f"ranks use different blocks of the {_class_name(self._model)} in one step, so their "
            f"gathers and reductions do not belong together: {shown}. "
            f"HINT: name blocks that all ranks run in each step: world.distribute(..., "
            f"blocks=[{self._around(inner)!r}]) in place of {inner!r}; or layout='data' with "
            "find_unused_parameters=True"
        )

    def _differing_places(self, rows: list[list[int]]) -> Iterator[int]:
        for place in range(max(map(len, rows))):
            if len({row[place] if place < len(row) else -1 for row in rows}) > 1:
                yield place

    def _describe(self, block: int) -> str:
        """Return name and parameters of a block."""
        group = self._groups[block]
        names = [self._names.get(id(p.sharded_param), "") for p in group.fsdp_params]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{group._module_fqn or 'the model'} ({', '.join(names[:3])}{more})"

    def _around(self, name: str) -> str:
        """Return the class of the next module around a block that is called as a whole."""
        while name:
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
            if not isinstance(module, WITHOUT_FORWARD):
                return _class_name(module)
        return _class_name(self._model)


def _class_name(module: nn.Module) -> str:
    """Return the name of the user's class, which FSDP has extended."""
    return type(module).__name__.removeprefix("FSDP")
