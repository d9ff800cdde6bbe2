"""Ranks that disagree about a collective are told so by name, before the data moves.

gloo and NCCL compare nothing over ranks: another size or type on one of them is silent garbage,
an abort or a hang. So the first FIRST collectives of a group, and every EVERYth after them, begin
with an all-gather of 128 bytes a rank over gloo: kind, bytes, dtype, root, operation, and the
line of the script. The numbers are the same on all members without a word between them, and
sizes that may differ by rank (uneven splits and parts, sparse tensors) count as alike.
A check takes as long as two small all-reduces: 0.5 ms with 2 ranks on two busy cores, so 8 ms
in all of the first 16.

A working script must go on working: a call that blocks anyway waits for the check, any other one
waits PATIENCE seconds, once in its group, and later looks at it when its result is waited for.
A group is checked only where all its members do so, which they count in its store before it is
made. ``PACELINE_AGREE=0`` on any rank turns it off.
"""

import datetime
import os
import struct
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ..ring.launcher_messages import notify
from ..ring.states import ROOTED_OPS, Op
from .error_messages import is_internal_file

CHECKED_AT_START, CHECK_INTERVAL = 16, 256
NONBLOCKING_WAIT_S = 1.0  # seconds, for a call that would not block
NOT_COMPARED = -1  # in a field that ranks need not share
_ROW = struct.Struct("<5q88s")
_FIELDS = 40  # bytes of a row that are compared
_KIND, _BYTES, _DTYPE, _ROOT, _REDUCTION = range(5)
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
AUTOGRAD_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
_LIBRARY = ("<", os.path.dirname(os.__file__))
_ROWS = list[tuple[int, int, int, int, int, bytes]]
_said = False
# Whether the profiler records what this thread does.
_profiled: Any = getattr(torch.autograd, "_enable_record_function", bool)


def announce_check(store: Any, name: str) -> str:
    """Before a group is made: this member would check. The key under which that is counted."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"paceline/agree/{attempt}/{name}"
    if store is not None and os.environ.get("PACELINE_AGREE") != "0":
        store.add(key, 1)
    return key


def make_check(group: dist.ProcessGroup, store: Any, key: str) -> "CollectiveCheck | None":
    """The checks of a group that has just been made; None where there are none. gloo connects
    all members while it is made, so each one has announced itself by now."""
    off = os.environ.get("PACELINE_AGREE") == "0" or os.environ.get("TORCH_GLOO_LAZY_INIT")
    if off or store is None or group.size() == 1:
        return None
    if torch.device("cpu") not in group._device_types:
        _not_checked(group)
        return None
    backend = group._get_backend(torch.device("cpu"))
    if backend.name().lower() != "gloo" or store.add(key, 0) != group.size():
        return None
    return CollectiveCheck(backend, group.rank(), group.size())


def _not_checked(group: dist.ProcessGroup) -> None:
    global _said
    if not _said and group.rank() == 0:
        notify(
            "paceline: whether ranks agree on their collectives is not checked, the group has no "
            "backend for the CPU. HINT: init_process_group('cpu:gloo,cuda:nccl')\n"
        )
    _said = True


def is_checked(number: int) -> bool:
    """Whether a group's collective of this number is checked."""
    return number <= CHECKED_AT_START or number % CHECK_INTERVAL == 0


class CollectiveCheck:
    """The checks of one group on one of its members."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.backend, self.rank, self.size = backend, rank, size
        self.patient = True  # until a call that need not block has waited in vain
        self.cost_ns = 0
        self._quickest = 1 << 62  # the last member to come waits for nobody: what a check costs
        self._free = [_Buffers(size)]  # made ahead: no tensors where a mode of torch's looks on

    def begin(
        self, group: Any, number: int, name: str, op: Op, args: Sequence[Any]
    ) -> "PendingCheck":
        """Check a collective that this member is about to launch: done, or at work where it
        must not wait any longer. Raises ValueError where members disagree."""
        start = time.monotonic_ns()
        options = next((arg for arg in args if hasattr(arg, "asyncOp")), None)
        buffers = self._free.pop() if self._free else _Buffers(self.size)
        row = _ROW.pack(*_signature(name, op, args), _place())
        check = PendingCheck(self, group, number, buffers, row, getattr(options, "timeout", None))
        blocks = options is not None and not options.asyncOp and op not in ROOTED_OPS
        if blocks:
            check.finish()
        elif self.patient:
            self.patient = check.wait(NONBLOCKING_WAIT_S)
        if check.done:
            self._quickest = min(self._quickest, time.monotonic_ns() - start)
            self.cost_ns = self._quickest
        return check

    def give_back(self, buffers: "_Buffers") -> None:
        self._free = [buffers]


class _Buffers:
    """What one check sends and gets, readable as bytes without torch."""

    def __init__(self, size: int) -> None:
        self.own, self.all = bytearray(_ROW.size), bytearray(_ROW.size * size)
        self.sent = torch.frombuffer(self.own, dtype=torch.uint8)
        self.got = torch.frombuffer(self.all, dtype=torch.uint8)


class PendingCheck:
    """One check under way."""

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
        buffers.own[:] = row
        options = AllgatherOptions()
        if isinstance(wait, datetime.timedelta) and wait > datetime.timedelta(0):
            options.timeout = wait
        # The backend's own method, unseen by whoever counts collectives or profiles.
        _profiled(False)
        try:
            self.work = checks.backend._allgather_base(buffers.got, buffers.sent, options)
        finally:
            _profiled(True)

    def wait(self, seconds: float) -> bool:
        """Whether it could be finished in so many seconds."""
        try:
            self.work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if not self.work.is_completed():
                return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for all members. Raises ValueError, the same on each, where they disagree."""
        if self.done:
            return
        self.work.wait()
        self.done = True
        table, first = self.buffers.all, self.buffers.own[:_FIELDS]
        starts = range(0, len(table), _ROW.size)
        alike = all(table[i : i + _FIELDS] == first for i in starts)
        rows: _ROWS = [] if alike else [_ROW.unpack_from(table, i) for i in starts]
        self.checks.give_back(self.buffers)
        differing = [f for f in range(5) if len({row[f] for row in rows} - {NOT_COMPARED}) > 1]
        if differing:
            raise ValueError(describe_mismatch(rows, differing, self.number, self.group))


def _signature(name: str, op: Op, args: Sequence[Any]) -> tuple[int, int, int, int, int]:
    """The five numbers that members must share."""
    root = next((arg.rootRank for arg in args if hasattr(arg, "rootRank")), NOT_COMPARED)
    reduction: Any = next((arg.reduceOp for arg in args if hasattr(arg, "reduceOp")), None)
    number = int(reduction.op) if hasattr(reduction, "op") else NOT_COMPARED
    if op == Op.BARRIER:
        return int(op), NOT_COMPARED, NOT_COMPARED, NOT_COMPARED, NOT_COMPARED
    tensors = _flat(args[:2])
    types = {tensor.dtype for tensor in tensors}
    dtype = next(iter(types)) if len(types) == 1 else None
    code = _DTYPES.index(dtype) if dtype in _DTYPES else NOT_COMPARED
    return int(op), _shared_bytes(name, op, args), code, int(root), number


def _flat(things: Any) -> list[torch.Tensor]:
    if isinstance(things, torch.Tensor):
        return [things]
    if not isinstance(things, (list, tuple)):
        return []
    return [tensor for thing in things for tensor in _flat(thing)]


def _shared_bytes(name: str, op: Op, args: Sequence[Any]) -> int:
    """The bytes that each member's call has to have in common with the others', else ANY."""
    tensors = _flat(args[:2])
    if any(tensor.layout != torch.strided for tensor in tensors):
        return NOT_COMPARED
    if op == Op.ALL_TO_ALL:
        splits = [arg for arg in args[2:4] if isinstance(arg, (list, tuple))]
        return NOT_COMPARED if len(splits) < 2 or any(splits) else int(args[1].nbytes)
    # A gather's root has a list that the others have not; what all have is the smaller side.
    side = 1 if op in (Op.ALL_GATHER, Op.GATHER) else 0
    parts = _flat(args[1 - side]) if name in ("allgather", "reduce_scatter") else []
    if len({tensor.nbytes for tensor in parts}) > 1:
        return NOT_COMPARED
    return sum(tensor.nbytes for tensor in _flat(args[side]))


def _place() -> bytes:
    """The line of the script that the call above comes from, and whose call it is."""
    try:
        frame: FrameType | None = sys._getframe(4)
    except ValueError:  # autograd's own thread, without any Python
        return b"in the backward\nDDP"
    assert frame is not None
    owner = "DDP" if frame.f_code is AUTOGRAD_ENGINE_CODE else ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "torch.nn.parallel.distributed":
            owner = "DDP"
        elif module.startswith("torch.distributed.fsdp"):
            owner = "FSDP"
        name = frame.f_code.co_filename
        library = "-packages" in name or module.startswith("torch.") or name.startswith(_LIBRARY)
        if not library and not is_internal_file(name):
            line = f"{os.path.basename(name)[-70:]}:{frame.f_lineno}\n{owner}"
            return line.encode(errors="replace")[:88]
        frame = frame.f_back
    return f"a library\n{owner}".encode()


# What is said


def describe_mismatch(rows: _ROWS, differing: list[int], number: int, group: Any) -> str:
    """Who disagrees with whom, and what to do."""
    try:
        members, name = dist.get_process_group_ranks(group), group.group_name
    except (KeyError, RuntimeError, ValueError):
        members, name = list(range(len(rows))), ""
    sides: dict[str, list[int]] = {}
    for rank, row in zip(members, rows, strict=True):
        sides.setdefault(_described(row, members, differing), []).append(rank)
    parts = ", ".join(f"{format_ranks(ranks)} {what}" for what, ranks in sides.items())
    of = f" of group {name}" if name else ""
    return f"ranks disagree about collective {number}{of}: {parts}. HINT: {_hint(differing, rows)}"


def _described(row: Any, members: list[int], differing: list[int]) -> str:
    kind, amount, dtype, root, reduction, place = row
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


def format_ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-2,5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _hint(differing: list[int], rows: _ROWS) -> str:
    if any(b"\nDDP" in row[5] for row in rows) and differing != [_KIND]:
        return "the same model, the same parameters in use and the same dtype on all ranks"
    if _KIND in differing:
        return (
            "the same collectives in the same order on all ranks: look for one inside an `if` on "
            "the rank, or a loop that a rank leaves early"
        )
    if _BYTES in differing or _DTYPE in differing:
        return (
            "the same shape and dtype on all ranks: where a rank's batch is smaller, pad it or "
            "leave it out (drop_last=True)"
        )
    return "the same src, dst and op on all ranks"
