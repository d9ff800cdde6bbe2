"""One rank of a job whose other ranks do not exist: its store and its process groups.

A collective returns what ranks with equal data would: shapes, dtypes and numbers of bytes are those
of the job, and values are not. A sum is this rank's part times the number of ranks, and what
another rank sends is unknown. Small results that all members of a group get alike (broadcasts and
sums on which a script may decide) are those of the first rank that was rehearsed. Each process
group that the script or Paceline creates is an ``EqualRanksGroup``, for every backend, and the
rendezvous is a store in this process, which has what this rank has written and never waits.
"""

# mypy: disable-error-code="override"
# The stub has all overloads of a method; torch calls one, with options as the last argument.

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ...analyze.rehearsal.facts import Members
from ...record.hooks.collectives import METHODS
from ...record.hooks.import_hooks import after_import
from ...record.hooks.taps import Function, around
from ...record.ring.states import POINT_TO_POINT_OPS, Op
from ..shared.async_collectives import CompletedWork
from .calls import CallLog


class RehearsalLimitError(RuntimeError):
    """The rehearsal can't go on, which says nothing about the ranks of the job."""


# C++ keeps its part of a store only, and does not find the methods of a collected object.
_alive: list["LoneStore"] = []


class LoneStore(Store):
    """A store in this process. C++ calls the methods by these names."""

    def __init__(self) -> None:
        super().__init__()
        _alive.append(self)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        now = self._values.get(key, b"")
        expected, desired = (
            value.encode() if isinstance(value, str) else bytes(value)
            for value in (expected_value, desired_value)
        )
        if now == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RehearsalLimitError(
                f"this rank waits for {missing[0]!r} in the store, which another rank sets. A "
                "rehearsed rank runs alone. HINT: exchange it by a collective, such as "
                "dist.broadcast"
            )

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815


_RedOp: Any = dist.ReduceOp.RedOpType
_SUMS = (_RedOp.SUM, _RedOp.PREMUL_SUM)


class EqualRanksGroup(dist.ProcessGroup):
    """A process group whose other members exist only as numbers.

    Attributes:
        members: Global ranks.
    """

    def __init__(self, rank: int, members: Members, name: str, backend: str, log: CallLog) -> None:
        # The stub knows only the constructor with a store.
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.members, self.log, self._backend_name = members, log, backend
        self._number, self._key = log.new_group(name, members)
        self._count = 0  # of its collectives
        fake = torch._C._distributed_c10d.FakeProcessGroup
        make: Any = getattr(fake, "_create_internal", fake)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, make(rank, len(members)))

    def getBackendName(self) -> str:  # noqa: N802  torch calls it by this name
        return self._backend_name

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Return at once. gloo has this barrier, and it returns no Work."""
        self._count += 1
        self.log.note(self._number, self._key, self._count, "barrier", ())

    def call(self, name: str, args: tuple[Any, ...]) -> dist.Work:
        """Note a call, and write what it returns to a rank among equal ones into the outputs."""
        op, _ = METHODS[name]
        self._count += op not in POINT_TO_POINT_OPS
        self.log.note(self._number, self._key, self._count, name, args)
        with torch.no_grad():
            outputs = _RESULTS[op](self, name, args)
        return CompletedWork(outputs)

    # results by operation

    def _all_reduce(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        tensors = _flat(args[0])
        if not self.log.receive(self._key, self._count, Op.ALL_REDUCE, tensors):
            for tensor in tensors:
                _times(tensor, self._factor(args))
            self.log.keep(self._key, self._count, Op.ALL_REDUCE, tensors)
        return tensors

    def _reduce(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        tensors = _flat(args[0])
        if self._root(args) == self.rank():
            for tensor in tensors:
                _times(tensor, self._factor(args))
        return tensors

    def _broadcast(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        tensors = _flat(args[0])
        if self._root(args) == self.rank():
            self.log.keep(self._key, self._count, Op.BROADCAST, tensors)
        elif not self.log.receive(self._key, self._count, Op.BROADCAST, tensors):
            self._unknown(tensors)
        return tensors

    def _all_gather(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        outputs, inputs = args[0], args[1]
        if torch.is_tensor(outputs):
            outputs, inputs = [outputs], [inputs]
        for output, source in zip(outputs, inputs, strict=True):
            parts = output if isinstance(output, list | tuple) else self._chunks(output)
            for part in parts:
                self._copy(part, source)
        return _flat(outputs)

    def _reduce_scatter(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        outputs, inputs = args[0], args[1]
        if torch.is_tensor(outputs):
            outputs, inputs = [outputs], [inputs]
        for output, source in zip(outputs, inputs, strict=True):
            parts = source if isinstance(source, list | tuple) else self._chunks(source)
            self._copy(output, parts[self.rank()])
            _times(output, self._factor(args))
        return _flat(outputs)

    def _gather(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        outputs = _flat(args[0])
        for output in outputs:
            self._copy(output, args[1][0])
        return outputs

    def _scatter(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        outputs = _flat(args[0])
        if self._root(args) == self.rank():
            self._copy(outputs[0], args[1][0][self.rank()])
        else:
            self._unknown(outputs)
        return outputs

    def _all_to_all(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        outputs, inputs = args[0], args[1]
        if torch.is_tensor(outputs):
            splits = [given if isinstance(given, list | tuple) else [] for given in args[2:4]]
            splits += [[]] * (2 - len(splits))
            outputs, inputs = self._split(outputs, splits[0]), self._split(inputs, splits[1])
        for output in outputs:  # each of the equal ranks sends what this one would send to itself
            self._copy(output, inputs[self.rank()])
        return _flat(outputs)

    def _receive(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        tensors = _flat(args[0])
        for tensor in tensors:
            tensor.detach().fill_(1)  # a valid index and flag
        return tensors

    def _nothing(self, _: str, args: tuple[Any, ...]) -> list[Any]:
        return []

    # parts

    def _factor(self, args: tuple[Any, ...]) -> int:
        """Return by what a reduction multiplies the part of each of the equal ranks."""
        for given in args[1:]:
            op = getattr(given, "reduceOp", given)
            # a ReduceOp equals its type, and not the other way round as "in" compares
            if isinstance(op, dist.ReduceOp | _RedOp) and any(op == kind for kind in _SUMS):
                return int(self.size())
        return 1

    def _root(self, args: tuple[Any, ...]) -> int:
        return next((int(a.rootRank) for a in args if hasattr(a, "rootRank")), 0)

    def _chunks(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return list(tensor.detach().view(self.size(), -1))

    def _split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        if not sizes:
            return self._chunks(tensor)
        return list(tensor.detach().split(list(sizes)))

    def _copy(self, output: torch.Tensor, source: torch.Tensor) -> None:
        if output.numel() == source.numel():
            output.detach().copy_(source.detach().reshape(output.shape))
        else:  # parts of other ranks have other sizes
            output.detach().fill_(1)

    def _unknown(self, tensors: Sequence[Any]) -> None:
        """Leave numbers, and replace counts and indices, which may not be initialized, by 1."""
        self.log.has_unknown = True
        for tensor in tensors:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                tensor.detach().fill_(1)


def _flat(tensors: Any) -> list[Any]:
    if torch.is_tensor(tensors):
        return [tensors]
    return [tensor for each in tensors for tensor in _flat(each)]


def _times(tensor: torch.Tensor, factor: int) -> None:
    if factor != 1 and tensor.dtype != torch.bool:
        tensor.detach().mul_(factor)


_RESULTS: dict[Op, Callable[[EqualRanksGroup, str, tuple[Any, ...]], list[Any]]] = {
    Op.ALL_REDUCE: EqualRanksGroup._all_reduce,
    Op.BROADCAST: EqualRanksGroup._broadcast,
    Op.ALL_GATHER: EqualRanksGroup._all_gather,
    Op.REDUCE_SCATTER: EqualRanksGroup._reduce_scatter,
    Op.REDUCE: EqualRanksGroup._reduce,
    Op.GATHER: EqualRanksGroup._gather,
    Op.SCATTER: EqualRanksGroup._scatter,
    Op.ALL_TO_ALL: EqualRanksGroup._all_to_all,
    Op.BARRIER: EqualRanksGroup._nothing,
    Op.SEND: EqualRanksGroup._nothing,
    Op.RECV: EqualRanksGroup._receive,
}


def _method(name: str) -> Callable[..., dist.Work]:
    def method(self: EqualRanksGroup, *args: Any, **_: Any) -> dist.Work:
        return self.call(name, args)

    method.__name__ = name
    return method


for _name in METHODS:
    if hasattr(dist.ProcessGroup, _name):  # names differ between PyTorch's versions
        setattr(EqualRanksGroup, _name, _method(_name))


VARIABLE = "PACELINE_REHEARSED_RANK"
BACKEND = "rehearsal"
_SCHEMES = ("env", "tcp", "file")


def is_rehearsed() -> bool:
    """Return whether this process is a rank of ``paceline run --rehearse``."""
    return VARIABLE in os.environ


def install(log: CallLog) -> None:
    """Replace process groups and rendezvous, now or when the script imports torch.distributed.

    Called before the recorder's hooks are installed, so that records have what the script called.
    """
    after_import(
        {
            "torch.distributed.distributed_c10d": functools.partial(_replace_groups, log),
            "torch.distributed.rendezvous": _replace_rendezvous,
        }
    )


def _replace_rendezvous(module: Any) -> None:
    def rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        given = parse_qs(urlsplit(url).query)
        rank = int(given.get("rank", [os.environ["RANK"]])[0])
        yield LoneStore(), rank, int(given.get("world_size", [os.environ["WORLD_SIZE"]])[0])

    for scheme in _SCHEMES:
        module._rendezvous_handlers[scheme] = rendezvous


def _replace_groups(log: CallLog, c10d: Any) -> None:
    asked: list[str] = []  # the backend that the script has named

    def create(options: Any, _: Any) -> Any:
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        name = str(options.group_id)
        return EqualRanksGroup(options.group_rank, members, name, asked[-1], log)

    c10d.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])

    def helper(
        make: Function,
        size: int,
        rank: int,
        members: list[int],
        backend: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        asked.append(str(backend))
        options.pop("device_id", None)  # of a GPU, which the rehearsal does not use
        if options.get("backend_options") is not None:  # of another backend
            options["backend_options"] = None
        try:
            group, store = make(size, rank, members, BACKEND, *args, **options)
        finally:
            asked.pop()
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            # what dist.get_backend and the configuration of later groups say
            world = c10d._world
            world.pg_map[group] = (c10d.Backend(str(backend)), world.pg_map[group][1])
            world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(str(backend))))
        return group, store

    around(c10d, "_new_process_group_helper", helper)
