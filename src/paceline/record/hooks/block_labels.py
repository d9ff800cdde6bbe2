"""Label collectives with the module that they serve.

The gathers and reductions of FSDP2 get the block whose parameters they carry, exchanges of a tensor
axis the layer.

A block is what one ``fully_shard`` call shards: parameters that are gathered together. FSDP2 calls
``FSDPParamGroup.unshard`` to launch a gather, also to prefetch it, and ``post_backward`` to reduce
and scatter the gradients. While one of them runs, ``Recorder.block_peer`` has the label, which the
process group writes into the events of its collectives.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from ..ring.header_schema import MAX_BLOCK_CHARS, MAX_BLOCKS
from ..ring.recorder import Recorder
from ..ring.states import FIRST_BLOCK_PEER, NO_PEER
from .hook_failures import failed_hooks, report_failure
from .taps import Tap

HOOK = "the blocks of sharded models"
FURTHER_BLOCKS = "further blocks"  # the name of all that the header has no room for
MAX_NAMES_CHARS = 6000  # of the 16 KiB of a header
_PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class BlockLabels:
    """The labels of one process: a number for each name of a block, in order of its first gather.

    Blocks of the same name in several models have the same label.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._peers: dict[str, int] = {}
        self._names: list[str] = []

    def peer_of(self, param_group: Any) -> int:
        """Return the label of a group of parameters; NO_PEER before FSDP2 has named it."""
        name = param_group._module_fqn
        return NO_PEER if name is None else self._label(name)

    def _label(self, name: str) -> int:
        found = self._peers.get(name)
        return self._add(name) if found is None else found

    def calls_of(self, name: str) -> AbstractContextManager[None]:
        """Label the collectives that begin in this context with the name of a module."""
        return self._labelled(partial(self._label, name))

    @contextmanager
    def _labelled(self, peer: Callable[[], int]) -> Iterator[None]:
        recorder, before = self._recorder, self._recorder.block_peer
        try:
            recorder.hook_calls += 1
            recorder.block_peer = peer()
        except Exception as error:
            report_failure(HOOK, error)
        try:
            yield
        finally:
            recorder.block_peer = before

    def _add(self, name: str) -> int:
        stored = name[:MAX_BLOCK_CHARS]
        room = MAX_NAMES_CHARS - sum(map(len, self._names))
        if self._names[-1:] == [FURTHER_BLOCKS]:
            number = len(self._names) - 1
        else:
            is_last = len(self._names) == MAX_BLOCKS - 1 or len(stored) > room
            number = len(self._names)
            self._names.append(FURTHER_BLOCKS if is_last else stored)
            self._recorder.update_header(blocks=self._names)
        self._peers[name] = FIRST_BLOCK_PEER - number
        return self._peers[name]

    def call_labelled(
        self, method: Callable[..., Any], param_group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of ``FSDPParamGroup`` with its collectives labelled."""
        if HOOK in failed_hooks:
            return method(param_group, *args, **kwargs)
        with self._labelled(partial(self.peer_of, param_group)):
            return method(param_group, *args, **kwargs)


_labels: weakref.WeakKeyDictionary[Recorder, BlockLabels] = weakref.WeakKeyDictionary()


def labels_of(recorder: Recorder) -> BlockLabels:
    """Return the labels of a recorder."""
    if recorder not in _labels:
        _labels[recorder] = BlockLabels(recorder)
    return _labels[recorder]


def labels_of_group(group: Any) -> BlockLabels | None:
    """Return the labels for collectives of a process group; None if it is not recorded."""
    recorder = getattr(group, "_recorder", None)
    return labels_of(recorder) if isinstance(recorder, Recorder) else None


def label_param_groups(recorder: Recorder) -> None:
    """Label the collectives of all models that FSDP2 shards."""
    for name in ("unshard", "post_backward"):
        Tap(_PARAM_GROUP, f"FSDPParamGroup.{name}").around(labels_of(recorder).call_labelled)


# Gradients of whole parameters that FSDP2 has not reduced yet.


def whole_gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of an ``FSDPParam`` that no exchange has taken yet; None without one."""
    accumulated: torch.Tensor | None = parameter.unsharded_accumulated_grad
    if accumulated is not None:
        return accumulated
    whole = getattr(parameter, "_unsharded_param", None)
    return None if whole is None else whole.grad
