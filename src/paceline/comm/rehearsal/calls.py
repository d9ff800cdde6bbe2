"""The collectives that a rehearsed rank has called, and what ranks before it have received."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...analyze.rehearsal.facts import Call, Members, RankFacts
from ...analyze.rehearsal.mismatches import collectives_by_group, difference
from ...record.hooks.collectives import METHODS, bytes_of_call, peer_of
from ...record.hooks.error_messages import script_line
from ...record.ring.states import POINT_TO_POINT_OPS, Op

# Results that later ranks get as well. Larger ones are data, on which no decision depends.
MAX_KEPT_BYTES = 1 << 20  # of one broadcast
MAX_KEPT_REDUCED_BYTES = 1 << 12  # of one all-reduce
MAX_ALL_KEPT_BYTES = 16 << 20

GroupKey = tuple[Members, int]  # and its number among groups of the same ranks


@dataclass(frozen=True)
class KeptResult:
    """What all members of a group receive in a collective.

    Attributes:
        members: Global ranks.
        ordinal: Number of the group among those of the same ranks.
        number: Number of the collective in its group, messages left out.
    """

    members: Members
    ordinal: int
    number: int
    op: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RanksDifferError(RuntimeError):
    """This rank calls another collective than a rank that ran before it."""


@dataclass
class CallLog:
    """The calls of this rank.

    Attributes:
        rank: Global rank.
        step: Number of completed optimizer steps.
        is_closed: Whether the rehearsal has ended: further calls are not noted.
        groups: Name and members of each group.
        kept: Results for later ranks.
        known: Those of ranks before this one, by group and number.
        others: Collectives of a rank before this one, by group, with its number.
        has_unknown: Whether this rank has got values in place of those of a rank that was not
            rehearsed before.
    """

    rank: int = 0
    step: int = 0
    is_closed: bool = False
    calls: list[Call] = field(default_factory=list)
    groups: list[tuple[str, Members]] = field(default_factory=list)
    kept: list[KeptResult] = field(default_factory=list)
    known: dict[tuple[GroupKey, int], KeptResult] = field(default_factory=dict)
    others: dict[GroupKey, tuple[int, list[Call]]] = field(default_factory=dict)
    has_unknown: bool = False
    _kept_bytes: int = 0

    def learn(self, facts: RankFacts, results: Sequence[KeptResult]) -> None:
        """Add calls and results of an earlier rank; the first rank's remain."""
        for result in results:
            self.known.setdefault(((result.members, result.ordinal), result.number), result)
        for key, calls in collectives_by_group(facts).items():
            self.others.setdefault(key, (facts.rank, calls))

    def new_group(self, name: str, members: Members) -> tuple[int, GroupKey]:
        """Return the number of a new group of this rank, and its key on all ranks."""
        ordinal = sum(members == other for _, other in self.groups)
        self.groups.append((name, members))
        return len(self.groups) - 1, (members, ordinal)

    def note(self, group: int, key: GroupKey, number: int, method: str, args: Any) -> None:
        """Note a call of a method of a process group.

        Args:
            number: Of the collective in its group, from 1; not used for messages.

        Raises:
            RanksDifferError: An earlier rank has called another collective.
        """
        if self.is_closed:
            return
        op, vector = METHODS[method]
        size = len(self.groups[group][1])
        amount = bytes_of_call(op, vector, args, size)
        call = Call(self.step, group, int(op), amount, peer_of(op, args), script_line())
        other, others = self.others.get(key, (0, []))
        if op not in POINT_TO_POINT_OPS and number <= len(others):
            text = difference(self.rank, call, other, others[number - 1], number)
            if text:
                raise RanksDifferError(
                    f"{text}. HINT: all ranks of a group must call the same collectives in the "
                    "same order"
                )
        self.calls.append(call)

    def keep(self, group: GroupKey, number: int, op: Op, tensors: Sequence[Any]) -> None:
        """Keep what all members receive, if it is small."""
        if (group, number) in self.known or len(tensors) != 1 or not _is_plain(tensors[0]):
            return
        tensor = tensors[0].detach()
        limit = MAX_KEPT_REDUCED_BYTES if op == Op.ALL_REDUCE else MAX_KEPT_BYTES
        if tensor.nbytes > min(limit, MAX_ALL_KEPT_BYTES - self._kept_bytes):
            return
        self._kept_bytes += tensor.nbytes
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dtype, shape = str(tensor.dtype), tuple(tensor.shape)
        self.kept.append(KeptResult(*group, number, int(op), dtype, shape, data))

    def receive(self, group: GroupKey, number: int, op: Op, tensors: Sequence[Any]) -> bool:
        """Write what an earlier rank has received into tensors; return whether it is known."""
        found = self.known.get((group, number))
        if found is None or found.op != op or len(tensors) != 1 or not _is_plain(tensors[0]):
            return False
        tensor = tensors[0].detach()
        if (str(tensor.dtype), tuple(tensor.shape)) != (found.dtype, found.shape):
            return False
        if found.data:
            values = torch.frombuffer(bytearray(found.data), dtype=tensor.dtype)
            tensor.copy_(values.view(tensor.shape))
        return True


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_conj()
    )
