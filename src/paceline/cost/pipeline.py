"""Formulas of pipelines: the share of a step in which stages wait."""

INTERLEAVED_CHUNKS = 2  # virtual stages of a rank


def chunks_of(schedule: str) -> int:
    """Return the number of virtual stages of a rank."""
    return INTERLEAVED_CHUNKS if schedule == "interleaved" else 1


def idle_share(schedule: str, stages: int, count: int) -> float:
    """Return the share of a step in which a rank waits, where a backward takes two forwards.

    It is (K - 1) / (M + K - 1) for K stages and M micro-batches; interleaved stages divide the
    first term by their number. "zero-bubble" hides the backward of parameters in it.
    """
    idle = (stages - 1) / chunks_of(schedule)
    if schedule == "zero-bubble":
        idle = (stages - 1) / 3  # of F + I - W, each a third of a micro-batch
    return idle / (count + idle)
