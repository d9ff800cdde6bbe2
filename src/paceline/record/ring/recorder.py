"""What hooks call: one recorder a rank, its clock, its ring and its own measured cost."""

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...version import __version__
from .launcher_messages import notify
from .ring import Ring
from .states import State

# Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a host.
now = time.monotonic_ns


class Recorder:
    """Records the states of one rank.

    ``step`` is the number of optimizer steps done; it is written into every event.
    With ``enabled=False`` every call does nothing. With ``wait=True`` nothing is recorded
    before ``join`` has said which rank this is.
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
        self.extra_cost_ns = 0  # that the stack's sampler measured of itself
        self.event_cost_ns = 0.0
        # What a hook or a collective's wrapper costs where it can't time itself, measured in
        # turns with the same call unrecorded; and how many there were.
        self.hook_calls, self.hook_cost_ns = 0, 0.0
        self.wrapped_calls, self.wrapper_cost_ns = 0, 0.0
        self.kernel_sampler: Any = None  # samples a GPU's kernels, where there is one
        self.flop_counter: Any = None  # counts the FLOPs of a step, where that was asked for
        self.experiment: Any = None  # ends a run of paceline diagnose
        self.launched_collectives: list[dict[str, int]] | None = None  # while kernels are sampled
        # Called where a backward reduces over a group, with the tensors where it is DDP that does.
        self.on_backward_reduce: Callable[[Any, Any], None] | None = None
        self._last_step_end = now()
        self._meta: dict[str, Any] = {}
        self._full = False  # no room for another group's name
        self._folder = folder
        self._ring: Ring | None = None
        if enabled and not wait:
            self._open(rank, size)
        _recorders.add(self)

    def _open(self, rank: int, size: int) -> None:
        self._meta = describe_rank(rank, size, self.started_ns)
        self._ring = _open_ring(rank, self._meta, self._folder)
        # On purpose in the method's place: an event is then one call.
        self.event = self._ring.writer(self)  # type: ignore[method-assign]
        self.begin = self._ring.begin_writer(self)  # type: ignore[method-assign]
        self.event_cost_ns = self._measure_event_cost()
        self._ring.clear()

    def drop_ring(self) -> None:
        """In a forked child, a DataLoader's worker say: the ring is the parent's."""
        self._ring = None
        self.__dict__.pop("event", None)
        self.__dict__.pop("begin", None)

    def join(self, rank: int, size: int) -> None:
        """The process has become ``rank`` of ``size``, whatever its environment said."""
        if not self.enabled:
            return
        if self._ring is None:
            self._open(rank, size)
        elif (rank, size) != (self._meta["rank"], self._meta["size"]):
            self._meta.update(rank=rank, size=size)
            self._ring.describe(self._meta)

    @property
    def path(self) -> Path | None:
        """The ring's file, which may have no name any more."""
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
        Replaced by the ring's writer where there is a ring."""

    def begin(self, state: int, since: int, seq: int = 0, group: int = 0, op: int = 0) -> None:
        """Say what the rank is in from ``since`` on, for whoever looks while it lasts. Replaced
        like ``event``."""

    @contextmanager
    def span(self, state: int) -> Iterator[None]:
        """Record the body of a ``with`` as ``state``, also where it raises."""
        start = now()
        self.begin(state, start)
        try:
            yield
        finally:
            self.event(state, start, now())

    def end_of_step(self) -> None:
        """Mark the end of an optimizer step, with the samples that went into it."""
        end = now()
        self.event(State.STEP, self._last_step_end, end, amount=self.samples)
        self._last_step_end = end
        self.samples = 0
        self.step += 1
        if self.kernel_sampler is not None:
            self.kernel_sampler.after_step()
        if self.flop_counter is not None:
            self.flop_counter.after_step()
        if self.experiment is not None:
            self.experiment.after_step()
        if self.step % 32 == 0:
            self.write_cost()

    def update_header(self, **fields: Any) -> None:
        """Write more of this rank into the header; a warning where it has no room."""
        try:
            if self._ring is not None:
                self._ring.describe(self._meta | fields)
                self._meta.update(fields)
        except ValueError:
            notify(f"warning: the record's header has no room for {', '.join(fields)}\n")

    def new_group(self, name: str, size: int, rank: int) -> int:
        """A number for the process group ``name`` (the same name on all its ranks); 0, and a
        warning, where the record's header has no room for more: it is not recorded then."""
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
                notify(f"warning: process group {name!r} and those after it are not recorded\n")
            return 0
        return int(number)

    @property
    def events(self) -> int:
        """Events written so far, those that the ring has overwritten included."""
        return self._ring.written if self._ring is not None else 0

    def cost_ns(self) -> int:
        """What recording has cost this rank so far: events, hooks and wrapped collectives, each
        times its measured cost, and what the stack's sampler measured of itself."""
        counted = self.events * self.event_cost_ns + self.hook_calls * self.hook_cost_ns
        return int(counted + self.wrapped_calls * self.wrapper_cost_ns) + self.extra_cost_ns

    def write_cost(self) -> None:
        """Write the cost so far into the header."""
        if self._ring is not None:
            self._ring.cost_ns = self.cost_ns()

    def clear(self) -> None:
        """Forget what was recorded so far."""
        self.hook_calls = self.extra_cost_ns = self.step = self.samples = 0
        self._last_step_end = now()
        if self._ring is not None:
            self._ring.clear()

    def snapshot(self) -> bytes:
        """The record as bytes, readable by ``analyze.records.read_record``; empty
        where recording is off."""
        if self._ring is None:
            return b""
        self.write_cost()
        return self._ring.snapshot()

    def _measure_event_cost(self) -> float:
        """Nanoseconds an event takes, clock reads included."""
        return measure_difference_ns(lambda: None, lambda: self.event(State.INPUT, now(), now()))


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def update_all_headers(**fields: Any) -> None:
    """Write more of this rank into the header of whatever records it."""
    for recorder in list(_recorders):
        recorder.update_header(**fields)


def _drop_rings() -> None:
    for recorder in _recorders:
        recorder.drop_ring()


os.register_at_fork(after_in_child=_drop_rings)


def measure_difference_ns(
    plain: Callable[[], Any], recorded: Callable[[], Any], turns: int = 11
) -> float:
    """By how much ``recorded`` takes longer than ``plain``: both in turns, median of pairs, with
    caches as cold as a training step leaves them."""
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


_CACHE_BYTES = 4 << 20  # more than a core's own cache


def _process_start() -> int:
    """When this process began, on the clock of ``now()``."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:  # not Linux
        return now()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now() - int(age * 1e9)


def describe_rank(rank: int, size: int, started: int) -> dict[str, Any]:
    """What a record says of itself."""
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
    """The cores this process may run on (bits, as the kernel writes masks), its threads, and the
    devices that it sees."""
    found: dict[str, Any] = {}
    if hasattr(os, "sched_getaffinity"):
        found["cores"] = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        found["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(name):
            found["devices"] = os.environ[name]
    return found


def clock_id() -> str:
    """Which clock ``now()`` reads: the same text for all processes whose times compare."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:  # not Linux, or an old one
        return socket.gethostname()


def _open_ring(rank: int, meta: dict[str, Any], folder: Path | None) -> Ring:
    """A ring in the launcher's folder, else in node-local memory, else in the tmp folder."""
    named = folder or os.environ.get("PACELINE_RECORD")
    folders = [Path(named)] if named else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    for place in folders:
        path = (
            place / f"paceline-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}-rank-{rank}.ring"
        )
        if named:
            path = place / f"rank-{rank}-{os.getpid()}.ring"
        try:
            ring = Ring(path, meta)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            problem = error
            continue
        if not named:
            # Nobody else reads it, so nothing of it is left behind however the rank ends.
            ring.unlink()
        return ring
    raise ValueError(
        f"no room for the record of rank {rank} in {' or '.join(map(str, folders))}: {problem}. "
        "HINT: free some space there, or paceline.init(record=False)"
    )
