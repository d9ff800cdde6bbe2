"""Which operations all ranks have submitted, decided equally on all ranks without a coordinator.

Ranks submit operations in any order, and from several threads. They meet again and again; a meeting
is one all-reduce (minimum) of a byte vector, and an exchange of messages if a rank has news:

    byte 0        0 if this rank has news: operations that are not in the cache, a join, a departure
    byte 1 + s    1 if this rank has submitted the operation in slot s of the cache

An operation is in the cache once all ranks have agreed on it. Its slot is the same on all ranks,
because every rank applies the same meetings in the same order. So from the second step on a meeting
is one all-reduce of a few bytes, and operations whose byte is 1 on all ranks are ready.

News are exchanged by an all-gather. Every rank keeps the same table of them, and finds the same
operations ready, or mismatched. An operation whose name is in the cache with other properties is
news; the name leaves the cache on all ranks, so that ranks which have submitted it as it was
announce theirs at the next meeting, where the mismatch is found.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....plurals import named_ranks
from .requests import Kind, ReduceOp, Request, find_mismatch

HEADER_BYTES = 1


@dataclass(frozen=True)
class Message:
    """The news of one rank.

    Attributes:
        requests: Operations that it has submitted and that are not in the cache.
        waiting: Names of submitted operations that are in the cache.
        joins: Whether it has no more data (``hvd.join``).
        leaves: Whether it takes part in no further meeting.
    """

    requests: list[Request] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    joins: bool = False
    leaves: bool = False


@dataclass
class Decision:
    """The result of a meeting, the same on all ranks.

    Attributes:
        ready: Operations to execute, in this order.
        errors: Reasons by name of operations on which ranks disagree.
        last_joined: Global rank that joined last, once all ranks have joined; else None.
        left: Global ranks that take part in no further meeting.
        had_news: Whether messages were exchanged.
    """

    ready: list[Request] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    last_joined: int | None = None
    left: list[int] = field(default_factory=list)
    had_news: bool = False


class Negotiator:
    """One rank's part of the negotiation. It exchanges nothing itself.

    Args:
        rank: Index of this rank among ``members``.
        members: Global ranks.
        capacity: Number of operations in the cache; 0 for no cache.
    """

    def __init__(self, rank: int, members: Sequence[int], capacity: int) -> None:
        self.rank, self.members, self.capacity = rank, list(members), capacity
        self.pending: dict[str, Request] = {}  # submitted on this rank and not finished
        self.table: dict[str, dict[int, Request]] = {}  # announced, by name and global rank
        self.wants_join = self.wants_leave = self.wants_report = False
        self._announced: set[str] = set()
        self._joined: list[int] = []  # global ranks, in the order in which they joined
        self._cache: OrderedDict[str, tuple[Request, int]] = OrderedDict()  # least recent first
        self._slots: list[str | None] = []

    @property
    def is_joined(self) -> bool:
        return self.members[self.rank] in self._joined

    @property
    def has_joined_ranks(self) -> bool:
        return bool(self._joined)

    @property
    def has_business(self) -> bool:
        """Whether this rank has a reason to meet the others."""
        return bool(self.pending) or self.wants_join or self.wants_leave or self.is_joined

    def submit(self, request: Request) -> None:
        self.pending[request.name] = request

    def vector(self) -> bytearray:
        """Return this rank's vector for the next meeting."""
        if self.is_joined:
            vector = bytearray(b"\1") * (HEADER_BYTES + len(self._slots))
        else:
            vector = bytearray(HEADER_BYTES + len(self._slots))
            for request in self.pending.values():
                if (slot := self._slot(request)) is not None:
                    vector[HEADER_BYTES + slot] = 1
        vector[0] = not self._has_news()
        return vector

    def message(self) -> Message:
        """Return this rank's news, which count as announced."""
        fresh = [one for one in self.pending.values() if self._is_fresh(one)]
        self._announced.update(one.name for one in fresh)
        self.wants_report = False
        waiting = [n for n, one in self.pending.items() if self._slot(one) is not None]
        return Message(fresh, waiting, self._joins_now(), self.wants_leave)

    def decide(self, vector: bytes | bytearray, messages: Sequence[Message] | None) -> Decision:
        """Return what follows from a meeting: the smallest bytes of all ranks, and the news."""
        decision = Decision(had_news=messages is not None)
        hits = [
            name
            for slot, name in enumerate(self._slots)
            if name is not None and vector[HEADER_BYTES + slot]
        ]
        for member, message in zip(self.members, messages or (), strict=False):
            self._take(member, message, decision)
        if len(self._joined) == len(self.members):
            decision.last_joined = self._joined[-1]
            self._joined.clear()
        else:
            for name in hits:
                request, _ = self._cache[name]
                self._cache.move_to_end(name)
                self._settle(request, decision)
            for name in [n for n, by_rank in self.table.items() if self._is_complete(by_rank)]:
                by_rank = self.table.pop(name)
                if reason := find_mismatch(by_rank):
                    decision.errors[name] = reason
                    self._forget(name)
                    continue
                request = next(iter(by_rank.values()))
                self._remember(request)
                self._settle(request, decision)
        return decision

    def submitted_by(self, messages: Sequence[Message]) -> dict[str, list[int]]:
        """Return the global ranks that have submitted each operation that is not ready."""
        found = {name: list(by_rank) for name, by_rank in self.table.items()}
        for member, message in zip(self.members, messages, strict=True):
            for name in message.waiting:
                found.setdefault(name, []).append(member)
        return found

    # Implementation.

    def _has_news(self) -> bool:
        return (
            self.wants_leave
            or self.wants_report
            or self._joins_now()
            or any(self._is_fresh(one) for one in self.pending.values())
        )

    def _joins_now(self) -> bool:
        """Whether this rank announces that it joins: once all that it submitted has ended."""
        return self.wants_join and not self.pending

    def _slot(self, request: Request) -> int | None:
        cached = self._cache.get(request.name)
        if cached is None or cached[0].signature != request.signature:
            return None
        return cached[1]

    def _is_fresh(self, request: Request) -> bool:
        return request.name not in self._announced and self._slot(request) is None

    def _take(self, member: int, message: Message, decision: Decision) -> None:
        for request in message.requests:
            self._evict(request.name)
            self.table.setdefault(request.name, {})[member] = request
        if message.joins:
            self._joined.append(member)
            if member == self.members[self.rank]:
                self.wants_join = False
        if message.leaves:
            decision.left.append(member)

    def _is_complete(self, by_rank: dict[int, Request]) -> bool:
        return all(member in by_rank or member in self._joined for member in self.members)

    def _settle(self, request: Request, decision: Decision) -> None:
        """Add an operation that all ranks have submitted."""
        self._forget(request.name)
        if self._joined and (reason := refused_with_joined(request, self._joined)):
            decision.errors[request.name] = reason
        else:
            decision.ready.append(request)

    def _forget(self, name: str) -> None:
        self.pending.pop(name, None)
        self._announced.discard(name)

    def _remember(self, request: Request) -> None:
        if not self.capacity or not request.is_named:
            return
        if len(self._cache) >= self.capacity:
            self._evict(next(iter(self._cache)))
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = request.name
        else:
            slot = len(self._slots)
            self._slots.append(request.name)
        self._cache[request.name] = (request, slot)

    def _evict(self, name: str) -> None:
        if name in self._cache:
            _, slot = self._cache.pop(name)
            self._slots[slot] = None


def refused_with_joined(request: Request, joined: Sequence[int]) -> str:
    """Return why an operation is impossible while these ranks have joined, or "".

    A joined rank contributes zeros, which only a sum does not notice.
    """
    if request.kind == Kind.ALLREDUCE and request.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return ""
    what = request.kind.name.lower()
    if request.kind == Kind.ALLREDUCE:
        what += f" with {request.op.name.capitalize()}"
    return (
        f"{what} {request.name!r} is not supported with Join at this time: {named_ranks(joined)} "
        "called hvd.join(). HINT: call it before hvd.join() on all ranks; between, only "
        "allreduce with Sum or Average is possible"
    )
