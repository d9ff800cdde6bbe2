"""Check that all ranks call the same collective before any data is exchanged.

gloo and NCCL compare nothing across ranks: a different size or dtype on one rank gives wrong data
without an error, an abort or a hang. Therefore the first CHECKED_AT_START collectives of a group,
and then every CHECK_INTERVAL-th, begin with an all-gather of 256 bytes per rank over gloo:
collective, bytes, dtype, root, reduction, the block of a sharded model (FSDP2) with its parameters,
and the line of the script. Which collectives are checked follows from their number, so that ranks
need no communication to decide. Sizes that may differ between ranks (uneven splits and parts,
sparse tensors) are not compared. A check takes as long as two small all-reduces: 0.5 ms with 2
ranks on two busy cores, 8 ms for the first 16.

The check must not break a correct script. A blocking call waits for the check. Any other call waits
NONBLOCKING_WAIT_S seconds; after the first time out in a group, its checks are completed when the
result is waited for. A group is checked only if all its members check, which they count in its
store before the group is made. ``PACELINE_AGREE=0`` on any rank disables the check.
"""

import datetime
import os
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ..rank_places import placed_ranks
from ..ring.launcher_messages import notify
from ..ring.states import ROOTED_OPS, Op
from .error_messages import is_internal_file

CHECKED_AT_START, CHECK_INTERVAL = 16, 256
NONBLOCKING_WAIT_S = 1.0  # in a call that would not block without the check
NOT_COMPARED = -1  # value of a field that may differ between ranks
_ROW = struct.Struct("<6q208s")
_COMPARED_BYTES = 48  # at the start of a row
_OP, _BYTES, _DTYPE, _ROOT, _REDUCTION, _BLOCK = range(6)
_PLACE_CHARS, _LINE_CHARS = 208, 70
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
AUTOGRAD_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
_LIBRARY_PREFIXES = ("<", os.path.dirname(os.__file__))
_ROWS = list[tuple[int, int, int, int, int, int, bytes]]
SAME_BLOCKS = (
    "run the same blocks of a sharded model on all ranks, in the same order: name the module "
    "around blocks that only some ranks run in world.distribute(..., blocks=[...])"
)
_warned = False
# Sets whether the profiler records what this thread does.
_set_profiling: Any = getattr(torch.autograd, "_enable_record_function", bool)


def announce_check(store: Any, name: str) -> str:
    """Count this rank as a checking member of a group that is about to be made; return the key."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"paceline/agree/{attempt}/{name}"
    if store is not None and os.environ.get("PACELINE_AGREE") != "0":
        store.add(key, 1)
    return key


def make_check(group: dist.ProcessGroup, store: Any, key: str) -> "CollectiveCheck | None":
    """Return the check of a group that has just been made; None if it is not checked.

    gloo connects all members while the group is made, so all of them have announced their check.
    """
    off = os.environ.get("PACELINE_AGREE") == "0" or os.environ.get("TORCH_GLOO_LAZY_INIT")
    if off or store is None or group.size() == 1:
        return None
    if torch.device("cpu") not in group._device_types:
        _warn_not_checked(group)
        return None
    backend = group._get_backend(torch.device("cpu"))
    if backend.name().lower() != "gloo" or store.add(key, 0) != group.size():
        return None
    return CollectiveCheck(backend, group.rank(), group.size())


def _warn_not_checked(group: dist.ProcessGroup) -> None:
    global _warned
    if not _warned and group.rank() == 0:
        notify(
            "paceline: ranks do not check that they call the same collectives, because the group "
            "has no backend for the CPU. HINT: init_process_group('cpu:gloo,cuda:nccl')\n"
        )
    _warned = True


def is_checked(number: int) -> bool:
    """Return whether a group's collective of this number is checked."""
    return number <= CHECKED_AT_START or number % CHECK_INTERVAL == 0


class CollectiveCheck:
    """The checks of one group on one rank."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.backend, self.rank, self.size = backend, rank, size
        self.waits_nonblocking = True  # until the check of a nonblocking call has timed out
        self.cost_ns = 0
        self._shortest_ns = 1 << 62  # the last rank does not wait: the cost of a check
        # made ahead: a torch dispatch mode must not see new tensors
        self._free_buffers = [_Buffers(size)]

    def begin(
        self, group: Any, number: int, name: str, op: Op, args: Sequence[Any]
    ) -> "PendingCheck":
        """Begin to check a collective that this rank is about to launch.

        The returned check is done, or pending if a nonblocking call must not wait any longer.

        Raises:
            ValueError: Ranks call different collectives.
        """
        start = time.monotonic_ns()
        buffers = self._free_buffers.pop() if self._free_buffers else _Buffers(self.size)
        row = _make_row(name, op, args)
        check = PendingCheck(self, group, number, buffers, row, option_of(args, "timeout"))
        if not option_of(args, "asyncOp", True) and op not in ROOTED_OPS:  # it blocks
            check.finish()
        elif self.waits_nonblocking:
            self.waits_nonblocking = check.wait(NONBLOCKING_WAIT_S)
        if check.done:
            self._shortest_ns = min(self._shortest_ns, time.monotonic_ns() - start)
            self.cost_ns = self._shortest_ns
        return check

    def give_back(self, buffers: "_Buffers") -> None:
        self._free_buffers = [buffers]


class _Buffers:
    """Send and receive buffers of one check, which can be read as bytes without torch."""

    def __init__(self, size: int) -> None:
        self.sent_bytes, self.received_bytes = bytearray(_ROW.size), bytearray(_ROW.size * size)
        self.sent = torch.frombuffer(self.sent_bytes, dtype=torch.uint8)
        self.got = torch.frombuffer(self.received_bytes, dtype=torch.uint8)


class PendingCheck:
    """The check of one collective, which may not have ended."""

    def __init__(
        self,
        checks: CollectiveCheck,
        group: Any,
        number: int,
        buffers: _Buffers,
        row: bytes,
        wait: Any,
    ) -> None:
        self.checks, self.group, self.number = checks, group, number
        self.buffers: _Buffers = buffers
        self.done = False
        buffers.sent_bytes[:] = row
        options = AllgatherOptions()
        if isinstance(wait, datetime.timedelta) and wait > datetime.timedelta(0):
            options.timeout = wait
        # The backend's method, so that neither the recorder nor a profiler sees this collective.
        _set_profiling(False)
        try:
            self.work = checks.backend._allgather_base(buffers.got, buffers.sent, options)
        finally:
            _set_profiling(True)

    def wait(self, seconds: float) -> bool:
        """Return whether the check could be finished within ``seconds``."""
        try:
            self.work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if not self.work.is_completed():
                return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for all ranks.

        Raises:
            ValueError: Ranks call different collectives. The message is the same on all ranks.
        """
        if self.done:
            return
        self.work.wait()
        self.done = True
        table, first = self.buffers.received_bytes, self.buffers.sent_bytes[:_COMPARED_BYTES]
        starts = range(0, len(table), _ROW.size)
        alike = all(table[i : i + _COMPARED_BYTES] == first for i in starts)
        rows: _ROWS = [] if alike else [_ROW.unpack_from(table, i) for i in starts]
        self.checks.give_back(self.buffers)
        differing = [f for f in range(6) if len({row[f] for row in rows} - {NOT_COMPARED}) > 1]
        if differing:
            raise ValueError(describe_mismatch(rows, differing, self.number, self.group))


def _make_row(name: str, op: Op, args: Sequence[Any]) -> bytes:
    """Return this rank's row. Nothing but the collective is compared if its arguments can't be."""
    try:
        block, place = _script_line()
        return _ROW.pack(*_signature(name, op, args), block, place)
    except Exception:  # arguments of a type that is not known must not fail the script
        return _ROW.pack(int(op), *[NOT_COMPARED] * 5, b"unknown line\n")


def _signature(name: str, op: Op, args: Sequence[Any]) -> tuple[int, int, int, int, int]:
    """Return the five numbers that must be equal on all ranks (or NOT_COMPARED)."""
    root, reduction = option_of(args, "rootRank", NOT_COMPARED), option_of(args, "reduceOp")
    number = int(reduction.op) if hasattr(reduction, "op") else NOT_COMPARED
    if op == Op.BARRIER:
        return int(op), NOT_COMPARED, NOT_COMPARED, NOT_COMPARED, NOT_COMPARED
    tensors = _flatten(args[:2])
    types = {tensor.dtype for tensor in tensors}
    dtype = next(iter(types)) if len(types) == 1 else None
    code = _DTYPES.index(dtype) if dtype in _DTYPES else NOT_COMPARED
    return int(op), _shared_bytes(name, op, args), code, int(root), number


def option_of(args: Sequence[Any], name: str, default: Any = None) -> Any:
    """Return an option of a collective from the arguments of the process group's method."""
    return next((getattr(arg, name) for arg in args if hasattr(arg, name)), default)


def _flatten(things: Any) -> list[torch.Tensor]:
    if isinstance(things, torch.Tensor):
        return [things]
    if not isinstance(things, (list, tuple)):
        return []
    return [tensor for thing in things for tensor in _flatten(thing)]


def _shared_bytes(name: str, op: Op, args: Sequence[Any]) -> int:
    """Return the bytes that must be equal on all ranks, or NOT_COMPARED."""
    tensors = _flatten(args[:2])
    if any(tensor.layout != torch.strided for tensor in tensors):
        return NOT_COMPARED
    if op == Op.ALL_TO_ALL:
        splits = [arg for arg in args[2:4] if isinstance(arg, (list, tuple))]
        return NOT_COMPARED if len(splits) < 2 or any(splits) else int(args[1].nbytes)
    # Only the root of a gather has a list; all ranks have the smaller side.
    side = 1 if op in (Op.ALL_GATHER, Op.GATHER) else 0
    parts = _flatten(args[1 - side]) if name in ("allgather", "reduce_scatter") else []
    if len({tensor.nbytes for tensor in parts}) > 1:
        return NOT_COMPARED
    return sum(tensor.nbytes for tensor in _flatten(args[side]))


def _script_line() -> tuple[int, bytes]:
    """Return the block of a sharded model, the script's line, and the collective's owner.

    The block is a number, or NOT_COMPARED. The owner is DDP, or FSDP with the block's parameters.
    """
    try:
        frame: FrameType | None = sys._getframe(5)
    except ValueError:  # a thread of autograd, without Python frames
        return NOT_COMPARED, b"in the backward\nDDP"
    assert frame is not None
    owner, block = "DDP" if frame.f_code is AUTOGRAD_ENGINE_CODE else "", NOT_COMPARED
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "torch.nn.parallel.distributed":
            owner = "DDP"
        elif module.startswith("torch.distributed.fsdp") and block == NOT_COMPARED:
            block, text = block_in(frame) or (NOT_COMPARED, "")
            owner = f"FSDP for {text}" if text else "FSDP"
        name = frame.f_code.co_filename
        library = (
            "-packages" in name or module.startswith("torch.") or name.startswith(_LIBRARY_PREFIXES)
        )
        if not library and not is_internal_file(name):
            line = f"{os.path.basename(name)[-_LINE_CHARS:]}:{frame.f_lineno}\n{owner}"
            return block, line.encode(errors="replace")[:_PLACE_CHARS]
        frame = frame.f_back
    return block, f"a library\n{owner}".encode(errors="replace")[:_PLACE_CHARS]


def block_in(frame: FrameType) -> tuple[int, str] | None:
    """Return number, name and parameters of the block that FSDP2 exchanges in a frame, or None."""
    if not str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.fsdp"):
        return None
    group = frame.f_locals.get("self")
    name = getattr(group, "_module_fqn", None)
    if group is None or name is None:
        return None
    parameters = [str(parameter._param_fqn) for parameter in group.fsdp_params]
    more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
    return zlib.crc32(name.encode()), f"{name or 'the model'} ({', '.join(parameters[:2])}{more})"


# The error message


def describe_mismatch(rows: _ROWS, differing: list[int], number: int, group: Any) -> str:
    """Return the error message: what each rank calls, and a hint."""
    try:
        members, name = dist.get_process_group_ranks(group), group.group_name
    except (KeyError, RuntimeError, ValueError):
        members, name = list(range(len(rows))), ""
    sides: dict[str, list[int]] = {}
    for rank, row in zip(members, rows, strict=True):
        sides.setdefault(_describe_call(row, members, differing), []).append(rank)
    parts = ", ".join(f"{placed_ranks(ranks)} {what}" for what, ranks in sides.items())
    of = f" of group {name}" if name else ""
    return f"ranks disagree about collective {number}{of}: {parts}. HINT: {_hint(differing, rows)}"


def _describe_call(row: Any, members: list[int], differing: list[int]) -> str:
    kind, amount, dtype, root, reduction, _, place = row
    op = Op(kind)
    line, _, owner = place.rstrip(b"\0").decode(errors="replace").partition("\n")
    what = op.name.lower().replace("_", "-")
    if amount != NOT_COMPARED:
        known = _DTYPES[dtype] if dtype != NOT_COMPARED else None
        size = f"{amount // known.itemsize} {str(known)[6:]}" if known else f"{amount} bytes"
        what += f" of {size}"
    if _ROOT in differing and root != NOT_COMPARED:
        what += f" {'to' if op in (Op.REDUCE, Op.GATHER) else 'from'} rank {members[root]}"
    if _REDUCTION in differing and reduction != NOT_COMPARED:
        what += f" with {dist.ReduceOp.RedOpType(reduction).name}"
    return f"{what}{' by ' + owner if owner else ''} ({line})"


def _hint(differing: list[int], rows: _ROWS) -> str:
    if any(b"\nFSDP for" in row[-1] for row in rows):
        return SAME_BLOCKS
    if any(b"\nDDP" in row[-1] for row in rows) and differing != [_OP]:
        return "use the same model, the same parameters and the same dtype on all ranks"
    if _OP in differing:
        return (
            "call the same collectives in the same order on all ranks; look for a collective "
            "inside an `if` that depends on the rank, or a loop that one rank leaves early"
        )
    if _BYTES in differing or _DTYPE in differing:
        return (
            "use the same shape and dtype on all ranks; if the last batch of a rank is smaller, "
            "pad it or drop it (drop_last=True)"
        )
    return "pass the same src, dst and op on all ranks"
