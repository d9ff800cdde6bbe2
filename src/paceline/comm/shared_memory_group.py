"""A process group with collectives over shared memory, and over the network between hosts.

Barriers, the supported collectives on CPU tensors, and messages between ranks of one node run here.
Everything else (other devices and dtypes, gathers to one rank) is passed to ``inner``, PyTorch's
group. The choice between the
two depends only on properties that are equal on all ranks.
"""

# mypy: disable-error-code="override"
# The stub has all overloads of a method; torch calls one, with options as the last argument.

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..record.hooks.collectives import METHODS, share_backends
from .hosts.hierarchy import HierarchicalKernel
from .shared.async_collectives import CollectiveThread, CompletedWork, PendingWork
from .shared.c_kernel import CKernel
from .shared.collective_calls import DTYPES, REDUCTIONS, ExchangeError
from .shared.messages import Messages
from .shared.torch_kernel import TorchKernel

DTYPE_INDEX = {getattr(torch, name): at for at, name in enumerate(DTYPES)}
_RedOp = dist.ReduceOp.RedOpType
REDUCTION_INDEX = {
    getattr(_RedOp, name): REDUCTIONS.index(how)
    for name, how in (
        *(("SUM", "sum"), ("AVG", "mean"), ("PRODUCT", "product")),
        *(("MIN", "min"), ("MAX", "max")),
    )
}
MEAN = REDUCTIONS.index("mean")
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # an output, and its input


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group whose collectives on CPU tensors run in shared memory within a node, and over
    TCP between nodes.

    Attributes:
        inner: PyTorch's group, for everything that is not supported here.
        kernel: Implementation of the collectives.
        timeout: Seconds that a rank waits for another one in a collective or a receive.
        reduces_over_gloo: Whether ``allreduce`` of one tensor is passed to ``inner``
            (``allreduce_coalesced`` is not).
        instead_of_gloo: Whether the tuner (comm.tune), not the user, has requested this group.

    The argument ``where`` returns the prefix of error messages (the step), and ``messages`` sends
    and receives between the ranks of one node.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        kernel: CKernel | TorchKernel | HierarchicalKernel,
        timeout: float,
        where: Callable[[], str] = str,
        messages: Messages | None = None,
    ) -> None:
        # The stub knows only the constructor with a store.
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.kernel, self.timeout, self._where = inner, kernel, timeout, where
        self._messages = messages
        self._worker = CollectiveThread("paceline-exchange")
        self._one = threading.Lock()  # held during a collective: one at a time, from any thread
        self._pid = os.getpid()
        self.reduces_over_gloo = self.instead_of_gloo = False
        share_backends(self, inner)

    def settle(self, seconds: float) -> None:
        """Wait before the group is destroyed: up to ``seconds`` for pending collectives.

        Messages that no socket has room for are waited for up to the group's timeout.
        """
        self._worker.close(seconds)
        if self._messages is not None:
            self._messages.flush()

    # Methods that torch calls.

    def getBackendName(self) -> str:  # noqa: N802  torch calls it by this name
        return "paceline"

    def allreduce(self, tensors: Any, *given: Any, **options: Any) -> dist.Work:
        how = _reduction_index(given)
        here = not self.reduces_over_gloo and len(tensors) == 1
        if how is None or not here or not _is_supported(tensors, how):
            return self.inner.allreduce(tensors, *given, **options)
        return self._start(lambda: self._reduce(tensors[0], how), tensors, given)

    def allreduce_coalesced(self, tensors: Any, *given: Any, **options: Any) -> dist.Work:
        how = _reduction_index(given)
        if how is None or not _is_supported(tensors, how):
            return self.inner.allreduce_coalesced(tensors, *given, **options)

        def run() -> None:
            for tensor in tensors:
                self._reduce(tensor, how)

        return self._start(run, tensors, given)

    def broadcast(self, tensors: Any, *given: Any, **options: Any) -> dist.Work:
        root = getattr(given[0], "rootRank", None) if given else None
        if root is None or len(tensors) != 1 or not _is_supported(tensors):
            return self.inner.broadcast(tensors, *given, **options)

        def run() -> None:
            with _in_place(tensors[0]) as flat:
                self.kernel.broadcast(flat.data_ptr(), flat.nbytes, int(root), self.timeout)

        return self._start(run, tensors, given)

    def allgather(self, outputs: Any, inputs: Any, *given: Any, **options: Any) -> dist.Work:
        alike = len(outputs) == len(inputs) == 1 and _is_supported([*inputs, *outputs[0]])
        if not alike or not all(_have_same_size(output, inputs[0]) for output in outputs[0]):
            return self.inner.allgather(outputs, inputs, *given, **options)
        return self._start(lambda: self._gather(inputs[0], outputs[0]), outputs[0], given)

    def reduce_scatter(self, outputs: Any, inputs: Any, *given: Any, **options: Any) -> dist.Work:
        how = _reduction_index(given)
        alike = len(outputs) == len(inputs) == 1
        if how is None or not alike or not _is_supported([*outputs, *inputs[0]], how):
            return self.inner.reduce_scatter(outputs, inputs, *given, **options)
        (to,), (tensors,) = outputs, inputs
        if not all(_have_same_size(tensor, to) for tensor in tensors):
            return self.inner.reduce_scatter(outputs, inputs, *given, **options)

        def run() -> None:
            flat = [tensor.contiguous() for tensor in tensors]
            with _in_place(to) as into:
                self._scatter([tensor.data_ptr() for tensor in flat], into, how)

        return self._start(run, outputs, given)

    def barrier(self, *given: Any, **options: Any) -> dist.Work:
        device = getattr(given[0], "device", None) if given else None
        if device is not None and device.type != "cpu":  # it waits for the device as well
            return self.inner.barrier(*given, **options)
        return self._start(lambda: self.kernel.barrier(self.timeout), [], given)

    def send(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        if self._messages is None or not _are_messages(tensors):
            return self.inner.send(tensors, peer, tag)
        self._check_process()
        return self._messages.send(tensors[0], peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        if self._messages is None or not _are_messages(tensors):
            return self.inner.recv(tensors, peer, tag)
        self._check_process()
        return self._messages.receive(tensors[0], peer, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        if self._messages is None or not _are_messages(tensors):
            return self.inner.recv_anysource(tensors, tag)
        self._check_process()
        return self._messages.receive(tensors[0], None, tag)

    def reduce_now(self, tensor: torch.Tensor, op: Any) -> bool:
        """All-reduce a tensor in place in this thread, with less overhead than ``allreduce``.

        Args:
            op: A value of dist.ReduceOp.RedOpType.

        Return False, and do nothing, where ``allreduce`` has to be called.
        """
        how = REDUCTION_INDEX.get(op)
        if how is None or self.reduces_over_gloo or not self._worker.idle:
            return False
        if self._pid != os.getpid() or not tensor.is_contiguous():
            return False
        if not _is_supported((tensor,), how):
            return False
        kind = DTYPE_INDEX[tensor.dtype]
        try:
            with self._one:
                self.kernel.all_reduce(tensor.data_ptr(), tensor.nbytes, kind, how, self.timeout)
        except ExchangeError as error:
            error.args = (f"{self._where()}{error}",)
            raise
        return True

    # Implementation.

    def _start(
        self, run: Callable[[], None], result: list[torch.Tensor], given: tuple[Any, ...]
    ) -> dist.Work:
        """Run a collective.

        It runs in the calling thread if the call is synchronous and no collective is pending, else
        in the worker thread.
        """
        self._check_process()
        where = self._where()

        def named() -> None:
            try:
                with self._one:
                    run()
            except ExchangeError as error:
                error.args = (f"{where}{error}",)
                raise

        if given and not getattr(given[0], "asyncOp", True) and self._worker.idle:
            named()
            return CompletedWork(result)
        work = PendingWork(named, result)
        self._worker.submit(work)
        return work

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                "paceline: this process was forked from a rank and can't call its collectives. "
                "HINT: call collectives in the rank, not in a worker of the DataLoader"
            )

    def _reduce(self, tensor: torch.Tensor, how: int) -> None:
        with _in_place(tensor) as flat:
            kind = DTYPE_INDEX[flat.dtype]
            self.kernel.all_reduce(flat.data_ptr(), flat.nbytes, kind, how, self.timeout)

    def _gathers(self, pairs: Pairs, given: tuple[Any, ...]) -> dist.Work | None:
        """Gather each input from all ranks into its output, in rank order; None: not supported."""
        alike = all(_have_same_size(output, source, self.size()) for output, source in pairs)
        if not alike or not _is_supported([tensor for pair in pairs for tensor in pair]):
            return None

        def run() -> None:
            for output, source in pairs:
                with _in_place(output) as into:
                    self._gather(source, into.view(-1).chunk(self.size()) if into.numel() else [])

        return self._start(run, [output for output, _ in pairs], given)

    def _gather(self, tensor: torch.Tensor, to: Sequence[torch.Tensor]) -> None:
        with contextlib.ExitStack() as places:
            each = [places.enter_context(_in_place(tensor)).data_ptr() for tensor in to]
            flat = tensor.contiguous()
            empty = [0] * self.size()
            self.kernel.all_gather(flat.data_ptr(), each or empty, flat.nbytes, self.timeout)

    def _scatters(self, pairs: Pairs, given: tuple[Any, ...]) -> dist.Work | None:
        """Reduce the part of each input that belongs to this rank; None: not supported."""
        how = _reduction_index(given)
        alike = all(_have_same_size(source, output, self.size()) for output, source in pairs)
        tensors = [tensor for pair in pairs for tensor in pair]
        if how is None or not alike or not _is_supported(tensors, how):
            return None

        def run() -> None:
            for output, source in pairs:
                flat = source.contiguous()
                first = flat.data_ptr()
                with _in_place(output) as into:
                    places = [first + into.nbytes * rank for rank in range(self.size())]
                    self._scatter(places, into, how)

        return self._start(run, [output for output, _ in pairs], given)

    def _scatter(self, sources: Sequence[int], into: torch.Tensor, how: int) -> None:
        kind, to = DTYPE_INDEX[into.dtype], into.data_ptr()
        self.kernel.reduce_scatter(sources, to, into.nbytes, kind, how, self.timeout)


def _flat(name: str, start: Callable[..., dist.Work | None]) -> Callable[..., dist.Work]:
    """Return a method of torch for tensors of all ranks in one, or for lists of them."""

    def method(self: SharedMemoryGroup, to: Any, source: Any, *given: Any, **options: Any) -> Any:
        pairs = [(to, source)] if torch.is_tensor(to) else list(zip(to, source, strict=True))
        work = start(self, pairs, given)
        return work or getattr(self.inner, name)(to, source, *given, **options)

    method.__name__ = name
    return method


# names of PyTorch 2.13 and of earlier ones
for _name in (
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    "all_gather_single_coalesced",
):
    setattr(SharedMemoryGroup, _name, _flat(_name, SharedMemoryGroup._gathers))
for _name in (
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    "reduce_scatter_single_coalesced",
):
    setattr(SharedMemoryGroup, _name, _flat(_name, SharedMemoryGroup._scatters))


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: SharedMemoryGroup, *given: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*given, **options)

    method.__name__ = name
    return method


# All other methods. torch calls a method that a Python group does not have with the interpreter
# lock held (PyProcessGroup.hpp). This may deadlock: gloo's thread may wait for the interpreter lock
# to free an earlier tensor, while it holds what the call waits for.
for _name in (*METHODS, "monitored_barrier"):
    if _name not in SharedMemoryGroup.__dict__ and hasattr(dist.ProcessGroup, _name):
        setattr(SharedMemoryGroup, _name, _passed_on(_name))


@contextlib.contextmanager
def _in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor as contiguous memory, and copy the result back on exit if it is a copy."""
    flat = tensor.contiguous()
    yield flat
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat)


def _have_same_size(one: torch.Tensor, other: torch.Tensor, times: int = 1) -> bool:
    """Return whether ``one`` has the dtype of ``other`` and ``times`` as many elements.

    PyTorch's group raises the error where it has not.
    """
    return one.dtype == other.dtype and one.numel() == times * other.numel()


def _reduction_index(given: tuple[Any, ...]) -> int | None:
    """Return the index of the reduction in REDUCTIONS, or None if it is not supported here."""
    if not given or not hasattr(given[0], "reduceOp"):
        return None
    return REDUCTION_INDEX.get(getattr(given[0].reduceOp, "op", given[0].reduceOp))


def _are_messages(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a send or receive runs here; sender and receiver decide alike."""
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def _is_supported(tensors: Sequence[torch.Tensor], how: int | None = None) -> bool:
    """Return whether these tensors are supported here.

    how: Index of the reduction that is applied to them; None without a reduction.
    """
    return all(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in DTYPE_INDEX
        and (how != MEAN or tensor.dtype.is_floating_point)
        for tensor in tensors
    )
