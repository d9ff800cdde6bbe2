"""Kinds of faults that the scorecard plants, and the script options or programs that cause them."""

from collections.abc import Callable
from dataclasses import dataclass

STRENGTHS = (0.3, 0.6, 1.2)  # time that a fault adds, as a fraction of the base step's time
WEAK, _, STRONG = STRENGTHS
# Durations on the machine on which this was developed; only the strengths depend on them.
# A small file is opened and read by two ranks at the same time, while diagnose observes them.
SMALL_FILE_S, READ_S_PER_BYTE = 28e-6, 2e-10
REDUCE_S, BARRIER_S, PRINT_S = 0.0004, 0.0004, 0.00003
EXCHANGE_S = 0.003  # all-reduce of 4 MiB, a layer of 1024 x 1024
LAYER_S, START_S, FAULT_S, VISIT_S = 0.001, 0.1, 2.5e-6, 1e-7
PAGE, BATCH, CHUNK = 4096, 64, 1 << 20


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        kind: Name of the kind.
        named: IDs of causes in diagnose that are correct for this fault.
        plant: Function of seconds per step and strength that returns the script's options.
        beside: Whether the seconds overlap with the step, so that only the part that exceeds the
            duration of the step adds to it.
        outside: Fault that is caused outside the script (beside.py), or "".
        alone: Whether the fault can't be combined with another, because it changes the step itself.
        cure: Script options that undo the fault, if a setting of `--try` can cure it.
    """

    kind: str
    named: tuple[str, ...]
    plant: Callable[[float, float], list[str]]
    beside: bool = False
    outside: str = ""
    alone: bool = False
    cure: tuple[str, ...] = ()


def _large(seconds: float) -> list[str]:
    """Return options for layers with little computation and long gradient synchronization."""
    return ["--batch", "8", "--width", "1024", "--layers", f"{max(2, round(seconds / EXCHANGE_S))}"]


def _chunks(seconds: float) -> int:
    return max(1, round(seconds / BATCH / READ_S_PER_BYTE / CHUNK))


FAULTS = (
    Fault(
        "input-waiting",
        ("input-waiting",),
        lambda s, _: ["--load-sleep", f"{s}"],
        cure=("--workers", "4"),
    ),
    Fault(
        "input-workers",
        ("input-waiting",),
        lambda s, _: ["--load-sleep", f"{2 * s}", "--workers", "2"],
        beside=True,
        cure=("--workers", "8"),
    ),
    Fault("input-preprocessing", ("input-preprocessing",), lambda s, _: ["--load-work", f"{s}"]),
    Fault(
        "input-small-files",
        ("input-small-files",),
        lambda s, _: ["--load-small", f"{max(1, round(s / BATCH / SMALL_FILE_S))}"],
    ),
    Fault(
        "input-bandwidth",
        ("input-bandwidth",),
        lambda s, _: ["--load-large", f"{_chunks(s) * CHUNK}"],
    ),
    Fault(
        "loader-start",
        ("loader-start",),
        lambda s, _: ["--workers", "2", "--epoch", f"{max(2, round(START_S / s))}"],
        alone=True,
        cure=("--persistent",),
    ),
    Fault("slow-rank", ("slow-rank",), lambda s, _: ["--slow-rank", "1", "--slow", f"{s}"]),
    Fault(
        "uneven-data",
        ("uneven-data",),
        lambda s, _: ["--longer", "5", "--sequence-products", f"{round(4 * s / LAYER_S)}"],
        alone=True,
    ),
    Fault(
        "exchange-latency",
        ("metric-collectives", "exchange-latency"),
        lambda s, _: ["--reduces", f"{round(s / REDUCE_S)}"],
    ),
    Fault("exchange-bandwidth", ("exchange-bandwidth",), lambda s, _: _large(s), alone=True),
    Fault(
        "bucket-size",
        ("bucket-size",),
        lambda s, _: ["--layers", f"{max(12, round(s / LAYER_S))}", "--bucket-mb", "0.1"],
        alone=True,
        cure=("--bucket-mb", "25"),
    ),
    Fault("no-overlap", ("no-overlap",), lambda s, _: ["--by-hand", *_large(s)], alone=True),
    Fault(
        "accumulation-exchange",
        ("accumulation-exchange",),
        lambda s, _: ["--accumulate", "4", "--products", "25", *_large(s / 4)],
        alone=True,
        cure=("--local",),
    ),
    Fault("barriers", ("synchronisation",), lambda s, _: ["--barriers", f"{round(s / BARRIER_S)}"]),
    Fault("prints", ("synchronisation",), lambda s, _: ["--prints", f"{round(s / PRINT_S)}"]),
    Fault(
        "too-many-threads",
        ("too-many-threads",),
        lambda _, k: ["--threads", f"{round(4 * k / WEAK)}"],
        alone=True,
        cure=("--threads", "1"),
    ),
    Fault(
        "binding", ("binding",), lambda *_: ["--on-core", "0"], alone=True, cure=("--on-core", "-1")
    ),
    Fault(
        "allocator",
        ("allocator",),
        lambda s, _: ["--touch", f"{round(s / FAULT_S) * PAGE}"],
        cure=("--reuse",),
    ),
    Fault("precision", ("precision",), lambda *_: ["--double"], alone=True),
    Fault(
        "unused-parameter-search",
        ("unused-parameter-search",),
        lambda *_: ["--unused", "--layers", "1500", "--width", "8", "--products", "0"],
        alone=True,
        cure=("--no-unused",),
    ),
    Fault(
        "garbage-collection",
        ("garbage-collection",),
        lambda s, _: ["--collect", f"{round(s / VISIT_S)}"],
    ),
    Fault("interpreter", ("interpreter",), lambda _, k: ["--holder", f"{k / STRONG}"], alone=True),
    Fault(
        "validation-on-one-rank",
        ("validation-on-one-rank",),
        lambda s, _: ["--validate", f"{5 * s}"],
    ),
    Fault(
        "checkpoint-on-one-rank", ("checkpoint-on-one-rank",), lambda s, _: ["--save", f"{5 * s}"]
    ),
    Fault("script", ("script",), lambda s, _: ["--script", f"{s}"]),
    Fault("noisy-machine", ("noisy-machine",), lambda *_: [], outside="busy", alone=True),
    Fault("slow-host", ("slow-host",), lambda *_: [], outside="throttled", alone=True),
    Fault(
        "slow-network",
        ("exchange-bandwidth",),
        lambda *_: ["--width", "20000"],
        outside="narrow",
        alone=True,
    ),
)
BY_KIND = {fault.kind: fault for fault in FAULTS}
