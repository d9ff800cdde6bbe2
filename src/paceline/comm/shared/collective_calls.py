"""Descriptions of collectives, and the errors of ranks that fail in them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...record.hooks.error_messages import NAMED_PEER_GONE

# In the order of the enums in combine.h and kernel.c.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
REDUCTIONS = ("sum", "mean", "product", "min", "max")
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "barrier")


class ExchangeError(RuntimeError):
    """Another rank died, timed out, or called a different collective."""


@dataclass(frozen=True)
class CollectiveCall:
    """A collective and its arguments, as ranks compare them.

    Attributes:
        op: Position in COLLECTIVES.
        dtype: Position in DTYPES.
        reduction: Position in REDUCTIONS.
        root: Source rank of a broadcast.
        nbytes: Size of the vector in bytes.
    """

    op: int
    dtype: int = 0
    reduction: int = 0
    root: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        text = f"{COLLECTIVES[self.op]} of {self.nbytes:,} bytes"
        if COLLECTIVES[self.op] in ("all-reduce", "reduce-scatter"):
            text += f" as {DTYPES[self.dtype]} ({REDUCTIONS[self.reduction]})"
        return text + (f" from rank {self.root}" if COLLECTIVES[self.op] == "broadcast" else "")


def rank_died_error(call: CollectiveCall, rank: int) -> ExchangeError:
    return ExchangeError(f"{call} {NAMED_PEER_GONE} {rank} has died")


def timeout_error(
    call: CollectiveCall, rank: int | str, timeout: float, also: str = ""
) -> ExchangeError:
    """Return the error for a rank that did not call the collective within ``timeout`` seconds.

    Args:
        rank: The rank, or a text such as "3 on node2".
        also: Further possible cause, appended to the first sentence.
    """
    return ExchangeError(
        f"{call}: rank {rank} did not join within {timeout:g} s{also}. HINT: check whether the "
        "rank is stopped; for longer computations, set a larger timeout= in paceline.init or "
        "init_process_group"
    )


def mismatch_error(rank_calls: Sequence[tuple[int, CollectiveCall]]) -> ExchangeError:
    """Return the error for two ranks that called different collectives.

    rank_calls: the two ranks, each with its call.
    """
    (first, first_call), (second, second_call) = sorted(
        rank_calls, key=lambda rank_call: rank_call[0]
    )
    return ExchangeError(
        f"ranks call different collectives: rank {first} calls {first_call}, and rank {second} "
        f"calls {second_call}. HINT: call the same collectives in the same order, with the same "
        "size and dtype, on all ranks"
    )
