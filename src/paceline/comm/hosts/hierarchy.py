"""Collectives of a group whose ranks are on several hosts: over memory in each, and between hosts
once for all of its ranks.

An all-reduce is a reduce-scatter in the host, an all-reduce of each part between the ranks that
hold it on all hosts, and an all-gather in the host. Where hosts have different numbers of ranks,
so many of each host have a part as the smallest has ranks."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from ..shared.c_kernel import Kernel
from ..shared.collective_calls import HOWS, OPS, Call, ExchangeError
from ..shared.open_group import BY_SOCKET
from . import schedules
from .c_wire import Program, StepError, Wire, program
from .failure_agreement import Trouble
from .rank_placement import Places
from .schedules import ALIGN, Link

SHORT = 16 << 10  # bytes: up to here the first rank of each host exchanges the whole vector
# Seconds that who waits for another host waits longer, so that the ranks of that host say first
# which of them is late; and who waits for one of its own host, which may wait for another one.
BETWEEN, LATER = 1.0, 4.0
MEAN = HOWS.index("mean")
ANY = ""  # algorithm: the one of the least cost


class Hierarchy:
    """As shared.native.Kernel, for all hosts. wire: of the ranks that have a part. link: what the
    slowest of the links between these hosts can do; algorithm: of an all-reduce between hosts; it
    may become another one while nothing is under way. told: what it was made with; BY_SOCKET: the
    one of the least cost between hosts."""

    def __init__(
        self,
        places: Places,
        kernel: Kernel,
        wire: Wire | None,
        link: Link,
        trouble: Trouble,
        algorithm: str = ANY,
    ) -> None:
        self.places, self._kernel, self._wire, self._link = places, kernel, wire, link
        self._trouble, self.told = trouble, algorithm
        self.algorithm = ANY if algorithm == BY_SOCKET else algorithm
        self.rank, self.size = places.rank, sum(map(len, places.ranks))
        self._hosts, self._host, self._local = len(places.ranks), places.host, places.local
        self._mates = places.ranks[self._host]

    def all_reduce(self, data: int, nbytes: int, kind: int, how: int, timeout: float) -> None:
        """The result is where the vector was."""
        call = Call(OPS.index("all-reduce"), kind, how, 0, nbytes)
        part, mine = self._part(nbytes)
        alone = len(self._mates) == 1  # nothing to sum up in the host; a mean is divided there
        with self._told(call, timeout):
            if not alone or how == MEAN:
                self._kernel.reduce_parts(data, nbytes, part, kind, how, self.size, timeout)
            if mine:
                self._run(self._all_reduce(mine), data + self._local * part, call, timeout)
            if not alone:
                self._kernel.gather_parts(data, nbytes, part, timeout + LATER)

    def reduce_scatter(
        self, sources: Sequence[int], to: int, nbytes: int, kind: int, how: int, timeout: float
    ) -> None:
        """sources: a vector of ``nbytes`` for each rank."""
        if not self.places.even:
            self._scatter_all(sources, to, nbytes, kind, how, timeout)
            return
        call = Call(OPS.index("reduce-scatter"), kind, how, 0, nbytes)
        each = -(-nbytes // ALIGN) * ALIGN
        room = torch.empty(max(each * self._hosts, 1), dtype=torch.uint8)
        with self._told(call, timeout):
            for host, ranks in enumerate(self.places.ranks):
                theirs = [sources[rank] for rank in ranks]
                into = room.data_ptr() + host * each
                self._kernel.reduce_scatter(theirs, into, nbytes, kind, how, timeout, self.size)
            cuts = [host * each for host in range(self._hosts + 1)]
            self._run(self._scattered(cuts), room.data_ptr(), call, timeout)
        ctypes.memmove(to, room.data_ptr() + self._host * each, nbytes)

    def all_gather(self, source: int, to: Sequence[int], nbytes: int, timeout: float) -> None:
        """to: room for ``nbytes`` of each rank."""
        call = Call(OPS.index("all-gather"), nbytes=nbytes)
        if not self.places.even:
            self._gather_all(source, to, nbytes, call, timeout)
            return
        if to[self.rank] != source:
            ctypes.memmove(to[self.rank], source, nbytes)
        like = [to[ranks[self._local]] for ranks in self.places.ranks]  # of the other hosts
        with self._told(call, timeout):
            self._run(self._gathered_at(like, nbytes), 0, call, timeout)
            for host, ranks in enumerate(self.places.ranks):
                theirs = [to[rank] for rank in ranks]
                self._kernel.all_gather(like[host], theirs, nbytes, timeout + LATER)

    def broadcast(self, data: int, nbytes: int, root: int, timeout: float) -> None:
        call = Call(OPS.index("broadcast"), root=root, nbytes=nbytes)
        its = next(at for at, ranks in enumerate(self.places.ranks) if root in ranks)
        part, mine = self._part(nbytes)
        with self._told(call, timeout):
            if its == self._host:
                self._kernel.broadcast(data, nbytes, self._mates.index(root), timeout)
            if mine:
                steps = _program("broadcast", mine, self._host, self._hosts, its)
                self._run(steps, data + self._local * part, call, timeout)
            if its != self._host:
                self._kernel.gather_parts(data, nbytes, part, timeout + LATER)

    def barrier(self, timeout: float) -> None:
        call = Call(OPS.index("barrier"))
        with self._told(call, timeout):
            self._kernel.barrier(timeout)
            if self._local == 0:
                self._run(_program("doubling", 0, self._host, self._hosts), 0, call, timeout)
            self._kernel.barrier(timeout + LATER)

    @property
    def sockets(self) -> int:
        """Of this host (Kernel.sockets)."""
        return self._kernel.sockets

    def by_socket(self, by: bool) -> None:
        """As Kernel's, on every host that has them."""
        self._kernel.by_socket(by)

    def close(self) -> None:
        """Of a group that is not used any more: to the others, this rank has gone."""
        self._trouble.close()
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._kernel.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    # How it is done.

    def _part(self, nbytes: int) -> tuple[int, int]:
        """Bytes of each rank's part, and of this one's."""
        owners = self.places.rails if nbytes > SHORT else 1
        part = max(-(-nbytes // (owners * ALIGN)) * ALIGN, ALIGN)
        return part, max(min(part, nbytes - self._local * part), 0) if self._local < owners else 0

    def _all_reduce(self, nbytes: int) -> Program:
        each = self.places.in_rack
        name = self.algorithm or _best(nbytes, self._hosts, self._link, each)
        return _program(name, nbytes, self._host, self._hosts, each=each)

    def _scattered(self, cuts: list[int]) -> Program:
        return program(_half("scatter", cuts, self._host, self._hosts))

    def _gathered(self, cuts: list[int]) -> Program:
        return program(_half("gather", cuts, self._host, self._hosts))

    def _gathered_at(self, places: list[int], nbytes: int) -> Program:
        """The same, where the parts lie anywhere."""
        cuts = [host * nbytes for host in range(self._hosts + 1)]
        at = dict(zip(cuts[:-1], places, strict=True)) if nbytes else {0: 0}

        def moved(messages: Sequence[schedules.Message]) -> tuple[schedules.Message, ...]:
            return tuple((host, at[place], count) for host, place, count in messages)

        steps = _half("gather", cuts, self._host, self._hosts)
        return program(schedules.Step(moved(one.sends), moved(one.receives)) for one in steps)

    def _scatter_all(
        self, sources: Sequence[int], to: int, nbytes: int, kind: int, how: int, timeout: float
    ) -> None:
        """Where hosts differ: all of it is summed up, and each rank takes its own."""
        each = -(-nbytes // ALIGN) * ALIGN
        room = torch.zeros(max(each * self.size, 1), dtype=torch.uint8)
        for rank, source in enumerate(sources):
            ctypes.memmove(room.data_ptr() + rank * each, source, nbytes)
        self.all_reduce(room.data_ptr(), each * self.size, kind, how, timeout)
        ctypes.memmove(to, room.data_ptr() + self.rank * each, nbytes)

    def _gather_all(
        self, source: int, to: Sequence[int], nbytes: int, call: Call, timeout: float
    ) -> None:
        """Where hosts differ: the first rank of each has all of its host, and exchanges that."""
        order = [rank for ranks in self.places.ranks for rank in ranks]
        room = torch.empty(max(nbytes * self.size, 1), dtype=torch.uint8)
        at = {rank: room.data_ptr() + nbytes * place for place, rank in enumerate(order)}
        firsts = [order.index(ranks[0]) * nbytes for ranks in self.places.ranks]
        with self._told(call, timeout):
            mine = [at[rank] for rank in self._mates]
            self._kernel.all_gather(source, mine, nbytes, timeout)
            if self._local == 0:
                steps = self._gathered([*firsts, nbytes * self.size])
                self._run(steps, room.data_ptr(), call, timeout)
            self._kernel.broadcast(room.data_ptr(), nbytes * self.size, 0, timeout + LATER)
        for rank in order:
            ctypes.memmove(to[rank], at[rank], nbytes)

    def _run(self, steps: Program, data: int, call: Call, timeout: float) -> None:
        assert self._wire is not None
        self._wire.run(steps, data, call, timeout + BETWEEN)

    @contextlib.contextmanager
    def _told(self, call: Call, timeout: float) -> Iterator[None]:
        """An error breaks the group on all hosts, and all ranks say the same."""
        self._trouble.look()
        try:
            yield
        except (ExchangeError, StepError) as error:
            told = self._trouble.told(error, call, timeout)
            self._kernel.give_up()
            self._trouble.close()
            raise told from None


@lru_cache(512)
def _best(nbytes: int, hosts: int, link: Link, each: int) -> str:
    return schedules.best(nbytes, hosts, link, each)


@lru_cache(512)
def _program(name: str, nbytes: int, me: int, hosts: int, root: int = 0, each: int = 0) -> Program:
    if name == "broadcast":
        return program(schedules.broadcast(nbytes, me, hosts, root))
    return program(schedules.all_reduce(name, nbytes, me, hosts, each))


def _half(name: str, cuts: list[int], me: int, hosts: int) -> Iterator[schedules.Step]:
    """Of an all-reduce: "scatter" or "gather"."""
    algorithm = "direct" if hosts <= schedules.AT_ONCE else "ring"
    steps: Iterator[schedules.Step] = getattr(schedules, f"{algorithm}_{name}")(cuts, me, hosts)
    return steps
