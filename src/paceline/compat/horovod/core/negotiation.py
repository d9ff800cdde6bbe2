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
class Fusion:
    """Settings of the exchange that may change during a run."""

    fusion_bytes: int
    cycle_s: float


@dataclass(frozen=True)
class Message:
    """The news of one rank.

    Attributes:
        requests: Operations that it has submitted and that are not in the cache.
        joins: Whether it has no more data (``hvd.join``).
        leaves: Whether it takes part in no further meeting.
        fusion: New settings for all ranks; only of the first rank.
    """

    requests: list[Request] = field(default_factory=list)
    joins: bool = False
    leaves: bool = False
    fusion: Fusion | None = None


@dataclass
class Decision:
    """The result of a meeting, the same on all ranks.

    Attributes:
        ready: Operations to execute, in this order.
        errors: Reasons by name of operations on which ranks disagree.
        last_joined: Global rank that joined last, once all ranks have joined; else None.
        left: Global ranks that take part in no further meeting.
        had_news: Whether messages were exchanged.
        fusion: New settings, from the operations of this meeting on.
    """

    ready: list[Request] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    last_joined: int | None = None
    left: list[int] = field(default_factory=list)
    had_news: bool = False
    fusion: Fusion | None = None


class Negotiator:
    """One rank's part of the negotiation. It exchanges nothing itself.

    Args:
        rank: Index of this rank among ``members``.
        members: Global ranks.
        capacity: Number of operations in the cache; 0 for no cache.

    Attributes:
        pending: Operations that this rank has submitted, by name.
        table: Operations that ranks have announced and that are not ready, by name and global rank.
        joined: Global ranks that have joined, in this order.
        wants_fusion: New settings that the first rank announces with its next news.
    """

    def __init__(self, rank: int, members: Sequence[int], capacity: int) -> None:
        self.rank, self.members, self.capacity = rank, list(members), capacity
        self.pending: dict[str, Request] = {}
        self.table: dict[str, dict[int, Request]] = {}
        self.wants_join = self.wants_leave = False
        self.wants_fusion: Fusion | None = None
        self._announced: set[str] = set()
        self.joined: list[int] = []
        self._cache: OrderedDict[str, tuple[Request, int]] = OrderedDict()  # least recent first
        self._slots: list[str | None] = []

    @property
    def is_joined(self) -> bool:
        return self.members[self.rank] in self.joined

    @property
    def has_business(self) -> bool:
        """Whether this rank has a reason to meet the others."""
        return bool(self.pending) or self.wants_join or self.wants_leave or self.is_joined

    def submit(self, request: Request) -> None:
        self.pending[request.name] = request

    def vector(self) -> bytearray:
        """Return this rank's vector for the next meeting."""
        joined = self.is_joined
        vector = bytearray(b"\1" if joined else b"\0") * (HEADER_BYTES + len(self._slots))
        has_news = self.wants_leave or self.wants_fusion is not None or self._joins_now()
        for name, request in self.pending.items():
            cached = self._cache.get(name)
            if cached is not None and _is_same(cached[0], request):
                vector[HEADER_BYTES + cached[1]] = 1
            elif name not in self._announced:
                has_news = True
        vector[0] = not has_news
        return vector

    def message(self) -> Message:
        """Return this rank's news, which count as announced."""
        fresh = [one for one in self.pending.values() if self._is_fresh(one)]
        self._announced.update(one.name for one in fresh)
        fusion, self.wants_fusion = self.wants_fusion, None
        return Message(fresh, self._joins_now(), self.wants_leave, fusion)

    def decide(self, vector: bytes | bytearray, messages: Sequence[Message] | None) -> Decision:
        """Return what follows from a meeting: the smallest bytes of all ranks, and the news."""
        decision = Decision(had_news=messages is not None)
        hits = self._names_in(vector)
        for member, message in zip(self.members, messages or (), strict=False):
            self._take(member, message, decision)
        if len(self.joined) == len(self.members):
            decision.last_joined = self.joined[-1]
            self.joined.clear()
        else:
            for name in hits:
                self._cache.move_to_end(name)
            if self.joined or self._announced:
                for name in hits:
                    self._settle(self._cache[name][0], decision)
            else:  # the same, quicker
                for name in hits:
                    self.pending.pop(name, None)
                decision.ready += [self._cache[name][0] for name in hits]
            for name in [n for n, by_rank in self.table.items() if self._is_complete(by_rank)]:
                by_rank = dict(sorted(self.table.pop(name).items()))
                if reason := find_mismatch(by_rank):
                    decision.errors[name] = reason
                    self._forget(name)
                    continue
                request = self.pending.get(name) or next(iter(by_rank.values()))
                self._remember(request)
                self._settle(request, decision)
        return decision

    # Implementation.

    def _names_in(self, vector: bytes | bytearray) -> list[str]:
        """Return the cached operations that all ranks have submitted."""
        found: list[str] = []
        at = vector.find(1, HEADER_BYTES)
        while at >= 0:
            name = self._slots[at - HEADER_BYTES]
            if name is not None:
                found.append(name)
            at = vector.find(1, at + 1)
        return found

    def _joins_now(self) -> bool:
        """Whether this rank announces that it joins: once all that it submitted has ended."""
        return self.wants_join and not self.pending

    def _is_fresh(self, request: Request) -> bool:
        cached = self._cache.get(request.name)
        is_known = cached is not None and _is_same(cached[0], request)
        return not is_known and request.name not in self._announced

    def _take(self, member: int, message: Message, decision: Decision) -> None:
        for request in message.requests:
            self._evict(request.name)
            self.table.setdefault(request.name, {})[member] = request
        if message.joins:
            self.joined.append(member)
            if member == self.members[self.rank]:
                self.wants_join = False
        if message.leaves:
            decision.left.append(member)
        if message.fusion is not None and member == self.members[0]:
            decision.fusion = message.fusion

    def _is_complete(self, by_rank: dict[int, Request]) -> bool:
        return all(member in by_rank or member in self.joined for member in self.members)

    def _settle(self, request: Request, decision: Decision) -> None:
        """Add an operation that all ranks have submitted."""
        self._forget(request.name)
        if self.joined and (reason := refused_with_joined(request, self.joined)):
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


def _is_same(one: Request, other: Request) -> bool:
    return one is other or one.signature == other.signature


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
