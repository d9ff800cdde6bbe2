"""Find the batches of each backward of a step, where a script reads several batches ahead."""

from ..facts.ranks import RankFacts
from ..facts.steps import BackwardFacts


def share_batches(backwards: list[BackwardFacts], facts: RankFacts) -> None:
    """Give each backward one batch if as many were read at once as backwards followed.

    Batches of an evaluation may have been read before them.
    """
    read = backwards[0].batches if backwards else []
    if len(backwards) < 2 or any(one.batches != read for one in backwards):
        return
    fetched = facts.without_evaluated(read)
    if len(fetched) == len(backwards):
        for one, batch in zip(backwards, fetched, strict=True):
            one.batches = [batch]
