"""What ranks do together, and how it is said where one of them does not."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...record.hooks.error_messages import NAMED_PEER_GONE

# As in combine.h and kernel.c.
KINDS = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
HOWS = ("sum", "mean", "product", "min", "max")
OPS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "barrier")


class ExchangeError(RuntimeError):
    """Another rank has died, was silent for too long, or does something else than this one."""


@dataclass(frozen=True)
class Call:
    """op, kind, how: positions in OPS, KINDS and HOWS."""

    op: int
    kind: int = 0
    how: int = 0
    root: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        said = f"{OPS[self.op]} of {self.nbytes:,} bytes"
        if OPS[self.op] in ("all-reduce", "reduce-scatter"):
            said += f" as {KINDS[self.kind]} ({HOWS[self.how]})"
        return said + (f" from rank {self.root}" if OPS[self.op] == "broadcast" else "")


def died(mine: Call, rank: int) -> ExchangeError:
    return ExchangeError(f"{mine} {NAMED_PEER_GONE} {rank} has died")


def silent(mine: Call, rank: int, timeout: float) -> ExchangeError:
    return ExchangeError(
        f"{mine}: rank {rank} did not come within {timeout:g} s. HINT: is it stopped, or does it "
        "compute for longer? A larger timeout= in init_process_group"
    )


def differ(two: Sequence[tuple[int, Call]]) -> ExchangeError:
    """Ranks, and what each of them has."""
    (one, its), (other, theirs) = sorted(two, key=lambda each: each[0])
    return ExchangeError(
        f"ranks do not exchange the same: rank {one} has {its}, and rank {other} has {theirs}"
    )
