"""The recorder of one rank, which the hooks call: its clock, its ring and its measured cost."""

import functools
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...security.processes import kernel_id, start_ticks
from ...version import __version__
from .core_wait import TrainingCoreWait
from .launcher_messages import notify
from .ring import Ring
from .states import NO_PEER, State

# Nanoseconds of CLOCK_MONOTONIC, which is one clock for all processes of a host.
now = time.monotonic_ns

FULL_SHARE = 0.9  # of a ring's capacity, above which it counts as full


class Recorder:
    """The recorder of one rank.

    ``step`` is the number of completed optimizer steps; it is written into every event. With
    ``enabled=False`` every call does nothing. With ``wait=True`` nothing is recorded before the
    first call of ``join``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        enabled: bool = True,
        folder: Path | None = None,
        wait: bool = False,
    ) -> None:
        self.enabled = enabled
        self.step = 0
        self.samples = 0  # of this rank since the last optimizer step
        self.started_ns = int(os.environ.get("PACELINE_STARTED_NS", 0)) or _process_start()
        self.extra_cost_ns = 0  # measured by the stack sampler and the collective check
        self.shares_samples = False  # whether ranks train parts of the same samples
        self.event_cost_ns = 0.0
        self.core_wait = TrainingCoreWait(self)
        self.core_wait_cost_ns = 0.0  # of one reading
        # Number of hook calls and of wrapped collectives, and their cost each, which they can't
        # measure themselves: it is measured against the same call unrecorded.
        self.hook_calls, self.hook_cost_ns = 0, 0.0
        self.wrapped_calls, self.wrapper_cost_ns = 0, 0.0
        self.kernel_sampler: Any = None  # a KernelSampler on GPUs
        self.flop_counter: Any = None  # a FlopCounter with --count-flops
        self.experiment: Any = None  # an Experiment of paceline diagnose
        self.step_watch: Any = None  # a StepWatch with --reference
        self.gradient_noise: Any = None  # a GradientNoise, once there is a process group
        self.launched_collectives: list[dict[str, int]] | None = None  # while kernels are sampled
        # Called when a backward launches an all-reduce: the group, and the tensors if DDP launched
        # it.
        self.on_backward_reduce: Callable[[Any, Any], None] | None = None
        # Called with each collective, while a line profile records their lines.
        self.on_collective: Callable[..., None] | None = None
        # While FSDP2 gathers or reduces a block: its label (record/hooks/block_labels.py).
        self.block_peer = NO_PEER
        self.training_thread = threading.main_thread().ident or 0  # whose states are recorded
        self.deputy_thread = 0  # that runs a call for which the training thread waits
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()  # RecordedGroups of this recorder
        self._last_step_end = now()
        self._meta: dict[str, Any] = {}
        self._full = False  # the header has no room for another group
        self._folder = folder
        self._ring: Ring | None = None
        if enabled and not wait:
            self._open(rank, size)
        _recorders.add(self)

    def _open(self, rank: int, size: int) -> None:
        self._meta = describe_rank(rank, size, self.started_ns)
        self._ring = _open_ring(rank, self._meta, self._folder)
        # These replace the methods, so that an event costs one call.
        self.event = self._ring.writer(self, self.core_wait.read)  # type: ignore[method-assign]
        begin = self._ring.begin_writer(self, self.core_wait.read)
        self.begin = begin  # type: ignore[method-assign]
        self.event_cost_ns = self._measure_event_cost()
        read = functools.partial(self.core_wait.read, sys.maxsize)
        self.core_wait_cost_ns = measure_difference_ns(lambda: None, read)
        self._ring.clear()

    def drop_ring(self) -> None:
        """Stop recording in a forked child (a DataLoader worker): the ring is the parent's."""
        self._ring = None
        self.core_wait.close()
        self.__dict__.pop("event", None)
        self.__dict__.pop("begin", None)

    def join(self, rank: int, size: int) -> None:
        """Set the rank and world size, which may differ from the environment variables."""
        if not self.enabled:
            return
        if self._ring is None:
            self._open(rank, size)
        elif (rank, size) != (self._meta["rank"], self._meta["size"]):
            self._meta.update(rank=rank, size=size)
            self._ring.describe(self._meta)

    @property
    def header(self) -> Mapping[str, Any]:
        """The fields of the record's header."""
        return self._meta

    @property
    def path(self) -> Path | None:
        """The ring's file; None without a ring, and if no other process reads it."""
        return self._ring.path if self._ring is not None else None

    def event(
        self,
        state: int,
        start: int,
        end: int,
        amount: int = 0,
        seq: int = 0,
        group: int = 0,
        op: int = 0,
        peer: int = -1,
    ) -> None:
        """Record that the rank was in ``state`` from ``start`` to ``end`` (ns of ``now()``).

        With a ring, the ring's writer replaces this method.
        """

    def begin(self, state: int, since: int, seq: int = 0, group: int = 0, op: int = 0) -> None:
        """Record that ``state`` began at ``since`` (ns). Replaced like ``event``."""

    @contextmanager
    def span(self, state: int) -> Iterator[None]:
        """Record the body of a ``with`` statement as ``state``, also if it raises."""
        start = now()
        self.begin(state, start)
        try:
            yield
        finally:
            self.event(state, start, now())

    def end_of_step(self) -> None:
        """Record the end of an optimizer step, with its number of samples."""
        end = now()
        self.event(State.STEP, self._last_step_end, end, amount=self.samples)
        self._last_step_end = end
        samples, self.samples = self.samples, 0
        self.step += 1
        if self.step_watch is not None:
            self.step_watch.after_step(samples)
        if self.gradient_noise is not None:
            self.gradient_noise.after_step(samples)
        if self.kernel_sampler is not None or self.flop_counter is not None:
            self._sample_step()
        if self.experiment is not None:
            self.experiment.after_step()
        if self.step % 32 == 0:
            self.write_cost()

    def _sample_step(self) -> None:
        """Call the samplers of kernels and FLOPs; one that fails is switched off."""
        for name in ("kernel_sampler", "flop_counter"):
            sampler = getattr(self, name)
            try:
                if sampler is not None:
                    sampler.after_step()
            except Exception as error:
                setattr(self, name, None)
                notify(f"warning: Paceline's {type(sampler).__name__} failed and is off: {error}\n")

    def backward_failed(self) -> None:
        """Drop the collectives of a backward that raised an exception, with their tensors."""
        for group in list(self.groups):
            group.drop_pending()

    def update_header(self, **fields: Any) -> None:
        """Add fields to the record's header; warn if it has no room for them."""
        try:
            if self._ring is not None:
                self._ring.describe(self._meta | fields)
                self._meta.update(fields)
        except ValueError:
            notify(f"warning: the record's header has no room for {', '.join(fields)}\n")

    def new_group(self, name: str, size: int, rank: int) -> int:
        """Return a number for the process group ``name`` (the same name on all its ranks).

        Returns 0 and warns if the record's header is full; the group is not recorded then.
        """
        groups = self._meta.setdefault("groups", {})
        number = str(len(groups) + 1)
        groups[number] = {"name": name, "size": size, "rank": rank}
        try:
            if self._ring is not None:
                self._ring.describe(self._meta)
        except ValueError:
            del groups[number]
            if not self._full:
                self._full = True
                notify(
                    f"warning: process group {name!r} and later ones are not recorded: the "
                    "record's header is full\n"
                )
            return 0
        return int(number)

    @property
    def events(self) -> int:
        """Number of events written, including those that the ring has overwritten."""
        return self._ring.written if self._ring is not None else 0

    @property
    def has_room(self) -> bool:
        """Whether the ring has room for more events before it overwrites the oldest."""
        return self._ring is not None and self.events < FULL_SHARE * self._ring.capacity

    def cost_ns(self) -> int:
        """Return the cost of recording so far (ns).

        It is the numbers of events, hook calls, wrapped collectives and readings of the run delay,
        each times its measured cost, plus what the stack sampler and the collective check measured
        of themselves.
        """
        counted = self.events * self.event_cost_ns + self.hook_calls * self.hook_cost_ns
        counted += self.core_wait.reads * self.core_wait_cost_ns
        return int(counted + self.wrapped_calls * self.wrapper_cost_ns) + self.extra_cost_ns

    def write_cost(self) -> None:
        """Write the cost of recording into the header."""
        if self._ring is not None:
            self._ring.cost_ns = self.cost_ns()

    def clear(self) -> None:
        """Discard all recorded events."""
        self.hook_calls = self.extra_cost_ns = self.step = self.samples = 0
        self.core_wait.reads = 0
        self._last_step_end = now()
        if self._ring is not None:
            self._ring.clear()

    def snapshot(self) -> bytes:
        """Return the record as bytes for ``analyze.records``; empty if not recording."""
        if self._ring is None:
            return b""
        self.write_cost()
        return self._ring.snapshot()

    def _measure_event_cost(self) -> float:
        """Return the nanoseconds of one event, including two clock reads."""
        # A launcher that reads the record meanwhile must not see a step.
        return measure_difference_ns(lambda: None, lambda: self.event(State.SAMPLE, now(), now()))


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def update_all_headers(**fields: Any) -> None:
    """Add fields to the headers of all recorders of this process."""
    for recorder in list(_recorders):
        recorder.update_header(**fields)


@contextmanager
def waiting_for_this_thread() -> Iterator[None]:
    """Record what this thread does as of the training thread, which waits for it meanwhile.

    For threads of other libraries that call back into this process, such as TensorFlow's.
    """
    recorders, own = list(_recorders), threading.get_ident()
    for recorder in recorders:
        recorder.deputy_thread = own
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.deputy_thread = 0


def _drop_rings() -> None:
    for recorder in _recorders:
        recorder.drop_ring()


os.register_at_fork(after_in_child=_drop_rings)


def measure_difference_ns(
    plain: Callable[[], Any], recorded: Callable[[], Any], turns: int = 11
) -> float:
    """Return by how many ns ``recorded`` takes longer than ``plain``.

    Both are called alternately; the result is the median of the pairs' differences. The caches are
    overwritten before each call, as a training step would do.
    """
    pairs, other, zeros = [], bytearray(_CACHE_BYTES), bytes(_CACHE_BYTES)
    for _ in range(turns):
        times = []
        for call in (plain, recorded):
            other[:] = zeros
            start = now()
            call()
            times.append(now() - start)
        pairs.append(times[1] - times[0])
    return float(max(0, sorted(pairs)[turns // 2]))


_CACHE_BYTES = 4 << 20  # larger than the cache of one core


def _process_start() -> int:
    """Return the start time of this process on the clock of ``now()``."""
    ticks = start_ticks(os.getpid())
    if ticks is None:  # not Linux
        return now()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now() - int(age * 1e9)


def describe_rank(rank: int, size: int, started: int) -> dict[str, Any]:
    """Return the initial header of a record."""
    return {
        "rank": rank,
        "size": size,
        "run": os.environ.get("PACELINE_RUN", ""),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "host": socket.gethostname(),
        "clock": clock_id(),
        "pid": os.getpid(),
        **_versions(),
        **_binding(),
        "started_ns": started,
        "joined_ns": now(),
        "wall_time": time.time(),
    }


def _versions() -> dict[str, str]:
    torch = sys.modules.get("torch")
    found = {"python": sys.version.split()[0], "paceline": __version__}
    return found | ({"torch": str(torch.__version__)} if torch is not None else {})


def _binding() -> dict[str, Any]:
    """Return the cores that this process may run on (hexadecimal mask), its threads and devices."""
    found: dict[str, Any] = {}
    if hasattr(os, "sched_getaffinity"):
        found["cores"] = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        # is_available() would initialize the driver: the script could not choose its GPUs any
        # more, nor use them in processes that it forks
        found["device"] = "cuda" if torch.cuda.device_count() else "cpu"
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(name):
            found["devices"] = os.environ[name]
    return found


def clock_id() -> str:
    """Return an id of the clock of ``now()``, equal for processes whose times are comparable."""
    return kernel_id("time") or socket.gethostname()


def _open_ring(rank: int, meta: dict[str, Any], folder: Path | None) -> Ring:
    """Make a ring in the launcher's folder, else in /dev/shm, else in the temporary folder."""
    named = folder or os.environ.get("PACELINE_RECORD")
    folders = [Path(named)] if named else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for place in folders:
        try:
            if named:
                return Ring(place / f"rank-{rank}-{os.getpid()}.ring", meta)
            return Ring(place, meta, unnamed=True)
        except OSError as error:
            problem = error
    raise ValueError(
        f"no room for the record of rank {rank} in {' or '.join(map(str, folders))}: {problem}. "
        "HINT: free space in one of these folders, or set paceline.init(record=False)"
    )
