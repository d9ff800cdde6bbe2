"""Record for each collective of a phase what it carries, and the line of the user's code.

The stack of each call is compared with those seen before by its code objects and instructions. Only
a new one is described. A function that several lines call has one site for each of these lines.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from ...ring.recorder import Recorder
from ...ring.stack_sampler import is_script
from ...ring.states import Op
from .activity import Described, StackDescriber, StackTable
from .sidecar import MAX_COLLECTIVE_SITES, MAX_SAMPLES, CollectiveKind, CollectiveSite

MAX_METRIC_BYTES = 1024  # of one rank: more than that is no count, loss or metric
# Size of a reduced tensor, relative to all gradients: then it holds copies of them, of any dtype.
MIN_GRADIENT_PART, MAX_GRADIENT_PART = 0.5, 2.0
MAX_PROBED_CALLS = 3  # of one site, whose tensors are compared with the gradients
USER_FRAMES = 2  # lines of the user's code that distinguish two sites
MAX_WALKED_FRAMES = 60
_BUFFER_FUNCTIONS = {"_sync_buffers", "_sync_module_buffers"}
_PARAMETER_FUNCTIONS = {"_sync_module_states", "_verify_param_shape_across_processes"}
_SHARDED_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable")
_NORM_MODULE = "torch.nn.modules._functions"  # of SyncBatchNorm
_REDUCTIONS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
_GATHERS = (Op.ALL_GATHER, Op.GATHER, Op.SCATTER)

_Key = tuple[int, ...]


@dataclass(slots=True)
class _Site:
    """One place that calls collectives."""

    number: int
    described: Described
    codes: list[CodeType]  # keeps the code objects of the key alive
    kind: CollectiveKind | None = None  # None: not decided yet
    guess: CollectiveKind = CollectiveKind.OTHER  # by the last call
    probed: int = 0
    bytes: int = 0
    count: int = 0


class CollectiveCalls:
    """The collectives of one rank while the measured steps of a phase run.

    Args:
        gradients: Returns the addresses of all gradients and of all parameters, and the bytes of
            the gradients.
    """

    def __init__(
        self, recorder: Recorder, gradients: Callable[[], tuple[set[int], set[int], int]]
    ) -> None:
        self._recorder, self._gradients = recorder, gradients
        self._describer = StackDescriber()
        self._sites: dict[_Key, _Site] = {}
        self._events: list[tuple[int, int, int]] = []  # group, number, site
        self._is_kept = False

    def start(self, is_kept: bool) -> None:
        """Observe collectives. Those of a phase that is not kept cost the same, for comparison."""
        self._is_kept = is_kept
        self._recorder.on_collective = self._note

    def stop(self) -> None:
        self._recorder.on_collective = None

    def _note(
        self, group: tuple[int, int], seq: int, op: int, tensors: Any, amount: int, backward: bool
    ) -> None:
        """Note a call. group: number and size. backward: whether it is part of a backward."""
        frame = sys._getframe(2)  # the code that called the process group
        key, codes = _key(frame, op, backward)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MAX_COLLECTIVE_SITES:
                return
            described = self._describer.describe(frame)
            site = self._sites[key] = _Site(len(self._sites), described, codes)
        if site.kind is None:
            of_rank = amount // group[1] if op in _GATHERS else amount
            found = self._kind(frame, Op(op), tensors, of_rank, backward)
            site.guess, site.probed = found, site.probed + 1
            uncertain = found in (CollectiveKind.METRIC, CollectiveKind.OTHER)
            if not uncertain or site.probed >= MAX_PROBED_CALLS:
                site.kind = found
        if self._is_kept and len(self._events) < MAX_SAMPLES:
            site.count += 1
            site.bytes += amount
            self._events.append((group[0], seq, site.number))

    def _kind(
        self, frame: FrameType, op: Op, tensors: Any, amount: int, backward: bool
    ) -> CollectiveKind:
        if op == Op.BARRIER:
            return CollectiveKind.BARRIER
        functions = list(_library_functions(frame))
        by_library = _kind_by_functions([name for _, name in functions])
        if by_library is not None:
            return by_library
        modules = [module for module, _ in functions]
        if _NORM_MODULE in modules:
            return CollectiveKind.OTHER
        is_sharded = any(module.startswith(_SHARDED_MODULES) for module in modules)
        if backward or (is_sharded and amount > MAX_METRIC_BYTES):
            return CollectiveKind.GRADIENT if op in _REDUCTIONS else CollectiveKind.PARAMETER
        gradients, parameters, size = self._gradients()
        address = _address(tensors)
        if address in gradients:
            return CollectiveKind.GRADIENT
        if address in parameters:
            return CollectiveKind.PARAMETER
        if amount <= MAX_METRIC_BYTES:
            return CollectiveKind.METRIC
        has_all = MIN_GRADIENT_PART * size <= amount <= MAX_GRADIENT_PART * size
        has_all &= op in _REDUCTIONS
        return CollectiveKind.GRADIENT if has_all else CollectiveKind.OTHER

    def sites(self, table: StackTable) -> list[CollectiveSite]:
        """Return the sites for the file; their stacks become part of ``table``."""
        return [
            {
                "kind": site.kind or site.guess,
                "stack": table.number_of(site.described),
                "count": site.count,
                "bytes": site.bytes,
            }
            for site in self._sites.values()
        ]

    def events(self) -> list[tuple[int, int, int]]:
        """Return group, number and site of each call."""
        return self._events


def _key(frame: FrameType, op: int, backward: bool) -> tuple[_Key, list[CodeType]]:
    key: list[int] = [op, int(backward)]
    codes: list[CodeType] = []
    users = 0
    at: FrameType | None = frame
    while at is not None and users < USER_FRAMES and len(codes) < MAX_WALKED_FRAMES:
        code = at.f_code
        key += (id(code), at.f_lasti)
        codes.append(code)
        users += is_script(code)
        at = at.f_back
    return tuple(key), codes


def _library_functions(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Yield module and name of the functions inside of the innermost line of the user's code."""
    at: FrameType | None = frame
    while at is not None and not is_script(at.f_code):
        yield str(at.f_globals.get("__name__", "")), at.f_code.co_name
        at = at.f_back


def carries_objects(frame: FrameType) -> bool:
    """Return whether code called by a function for Python objects, as all_gather_object, runs."""
    return any("object" in name for _, name in _library_functions(frame))


def serves_checkpoint(frame: FrameType) -> bool:
    """Return whether torch.distributed.checkpoint runs, also in a thread of ``async_save``."""
    return any(
        module.startswith("torch.distributed.checkpoint") for module, _ in _library_functions(frame)
    )


def _kind_by_functions(names: list[str]) -> CollectiveKind | None:
    if any("object" in name for name in names):  # all_gather_object, broadcast_object_list, ...
        return CollectiveKind.OBJECT
    if not _BUFFER_FUNCTIONS.isdisjoint(names):
        return CollectiveKind.BUFFER
    return None if _PARAMETER_FUNCTIONS.isdisjoint(names) else CollectiveKind.PARAMETER


def _address(tensors: Any) -> int:
    """Return the address of the first tensor in a nested list; 0 if it has none."""
    while isinstance(tensors, list | tuple) and tensors:
        tensors = tensors[0]
    try:
        return int(tensors.data_ptr())
    except (AttributeError, RuntimeError):
        return 0
