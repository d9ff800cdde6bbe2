"""Observe the collectives of the script."""

import functools
from typing import Any

import torch

from ...hooks.taps import Function, on_import, replace
from ..facts.events import CollectiveFacts
from ..observation import Observation
from ..user_lines import is_called_by, user_line

_HOOK = "the collectives"
_REMOVES_REPEATED = ("/accelerate/accelerator.py", "gather_for_metrics")
MAX_COLLECTIVES = 1 << 14


class Collectives:
    """The collectives of this process, observed at its process groups.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Patch the methods of the recorder's process group."""
        on_import("torch.distributed.distributed_c10d", self._patch)

    def _patch(self, module: Any) -> None:
        from ...hooks.collectives import METHODS, RecordedGroup

        for name in METHODS:
            if name in vars(RecordedGroup):
                replace(RecordedGroup, name, functools.partial(self._observed, name))

    def _observed(self, name: str, method: Function) -> Function:
        note = self._observation.guarded(_HOOK, self._note)

        def call(group: Any, *args: Any, **options: Any) -> Any:
            # A recorder without a file measures the cost of recording.
            if not self._observation.is_over and group._recorder.path is not None:
                note(name, args, options)
            return method(group, *args, **options)

        return call

    def _note(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        facts = self._observation.facts.collectives
        if len(facts) >= MAX_COLLECTIVES:
            self._observation.add_unseen(f"collectives after the first {MAX_COLLECTIVES}")
            return
        tensors = _tensors(args[0]) if args else []
        in_backward = torch._C._current_graph_task_id() != -1
        facts.append(
            CollectiveFacts(
                kind=name.strip("_").removesuffix("_base").removesuffix("_coalesced"),
                operation=_operation([*args, *options.values()]),
                nbytes=sum(one.nbytes for one in tensors if not one.is_sparse),
                phase=self._observation.phase,
                step=self._observation.step,
                is_in_backward=in_backward,
                line="" if in_backward else user_line(),
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                removes_repeated=not in_backward and is_called_by(*_REMOVES_REPEATED),
            )
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _operation(args: list[Any]) -> str:
    """Return the name of the operation in a collective's options, such as "sum"; "" if none."""
    for one in args:
        found = one if type(one).__name__ in ("ReduceOp", "RedOpType") else None
        found = getattr(one, "reduceOp", found)
        if found is not None:
            text = str(getattr(found, "op", found))
            return text.rpartition(".")[2].lower().partition(":")[0].strip("<> ")
    return ""
