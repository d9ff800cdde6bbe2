"""A pass over a loader that is not over."""

from dataclasses import dataclass, field
from typing import Any

from ..facts.samples import LoaderFacts, PassFacts


@dataclass
class OpenPass:
    """A pass that is not over.

    Attributes:
        loader, facts: The loader's facts, and those of the pass.
        source: The loader.
        indices: Indices of each batch that was requested so far; None: not known.
        returned: Number of batches that were returned.
        is_short: Whether the pass may be shortened.
        is_stopped: Whether it was.
        is_at_end: Whether the batch that was returned last is known to be the last one.
        samples: Number of samples of the batch that is returned next, if it is known.
    """

    loader: LoaderFacts
    facts: PassFacts
    source: Any
    indices: list[list[int] | None] = field(default_factory=list)
    returned: int = 0
    is_short: bool | None = None
    is_stopped: bool = False
    is_at_end: bool = False
    samples: int | None = None
    first_group: int = 0  # batches of the first step of the pass
    planned: list[list[int]] | None = None
    ahead: int | None = None  # a batch that a library has read, but not passed on yet
    rest: list[Any] = field(default_factory=list)  # indices that were taken from the sampler before
    sampler: Any = None  # the iterator over the rest of the batches' indices
