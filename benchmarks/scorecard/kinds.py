"""Kinds of faults that are injected into unseen scripts, and the answers that count as right."""

from dataclasses import dataclass

# A cause with one of these ids is right for every kind if the first place that it names is a line
# of the injected code, or the script's line that calls it.
LINED = ("line", "script", "synchronisation", "slow-rank")
NOISE = ("jitter", "noisy-machine")  # not a false alarm while other programs use the cores


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        causes: Ids of causes that are right without a line, too.
        peer: Kinds of TraceML's primary diagnosis that are right, in lower case with hyphens.
    """

    causes: tuple[str, ...]
    peer: tuple[str, ...]


_INPUT = ("input-bound",)
_COMPUTE = ("compute-bound",)
_OTHER = ("residual-heavy",)
_UNEVEN = ("straggler", "compute-straggler", "input-straggler")

KINDS = {
    "whole-file": Kind(("input-bandwidth", "input-whole-file"), _INPUT),
    "chunks": Kind(("input-bandwidth", "input-preprocessing", "input-chunks"), _INPUT),
    "small-files": Kind(("input-small-files",), _INPUT),
    "preprocessing": Kind(("input-preprocessing",), _INPUT),
    "too-few-workers": Kind(("input-waiting", "input-workers"), _INPUT),
    "loader-restart": Kind(("loader-start",), _INPUT),
    "python-loop": Kind(("python-loop", "small-operators"), _COMPUTE),
    "padding": Kind(("padding",), _COMPUTE),
    "unused-work": Kind(
        ("unused-output", "unneeded-gradient", "second-backward"), (*_COMPUTE, *_OTHER)
    ),
    "recomputation": Kind(("recomputation", "activation-checkpointing"), _COMPUTE),
    "tiny-operators": Kind(("small-operators",), (*_COMPUTE, *_OTHER)),
    "huge-intermediate": Kind(("allocator", "large-intermediate"), (*_COMPUTE, *_OTHER)),
    "float64": Kind(("precision",), _COMPUTE),
    "garbage-collection": Kind(("garbage-collection",), _OTHER),
    "hook-copies": Kind(("hooks", "allocator"), _COMPUTE),
    "output": Kind(("synchronisation",), _OTHER),
    "metrics": Kind(
        ("exchange-latency", "exchange-bandwidth", "metric-collectives", "object-collectives"),
        _OTHER,
    ),
    "buffers": Kind(
        ("exchange-bandwidth", "exchange-latency", "buffer-broadcast"), (*_COMPUTE, *_OTHER)
    ),
    "small-reduces": Kind(("exchange-latency", "no-overlap", "metric-collectives"), _OTHER),
    "barriers": Kind(("synchronisation", "exchange-latency"), _OTHER),
    "checkpoints": Kind(("checkpoint", "checkpoint-on-one-rank"), _OTHER),
    "validation": Kind(("validation", "validation-on-one-rank"), (*_OTHER, *_UNEVEN)),
    "moving-average": Kind(("moving-average", "small-operators"), _OTHER),
    "lock": Kind(("input-waiting", "lock"), _INPUT),
    "thread": Kind(("interpreter", "thread"), _COMPUTE),
    "too-many-threads": Kind(("too-many-threads",), _COMPUTE),
    "noisy-machine": Kind(("noisy-machine", "shared-machine"), _COMPUTE),
    "affinity": Kind(("binding",), _COMPUTE),
    "more-data": Kind(("uneven-data", "slow-rank"), _UNEVEN),
    "throttled": Kind(("slow-rank", "slow-host", "throttled"), _UNEVEN),
    "leak": Kind(("allocator", "memory-leak"), ("memory-creep",)),
}
