"""What describes a mistake that ``paceline verify`` finds, and a finding of one.

Each module of ``rules/`` has the descriptions of the mistakes that its rules find.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from .comparison import Difference


class Nature(StrEnum):
    """What a finding is based on."""

    MEASURED = "measured"  # something differs from one process, or between ranks
    MEANT = "meant"  # it does, and the same in one process that trains the ranks' batches in turn
    QUESTION = "question"  # both values are given; which one is right depends on the intention


@dataclass(frozen=True)
class Meant:
    """A difference from one process that a script may mean, and that is confirmed.

    By an experiment, or as the printed number is known on the ranks.

    Attributes:
        name: Name for ``--accept``.
        clause: What it is, as the end of a sentence.
        is_usual: Whether right trainings have it: it does not change the exit code.
    """

    name: str
    clause: str
    is_usual: bool


MEANT = {
    one.name: one
    for one in (
        Meant("batch-norm", "batch normalization over the part of a rank", is_usual=True),
        Meant("random-numbers", "random numbers of each rank in the model or the loop", True),
        Meant("padding", "padding of the batches of each rank to their longest sample", True),
        Meant("part-loss", "a loss or a normalization over the part of a rank", is_usual=False),
        Meant("own-loss", "a printed loss of the batches of one rank", is_usual=False),
    )
}


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake.

    Attributes:
        id: Name in ``--json``.
        title: What is wrong, in a few words.
        measured: What is measured for it; what is asked about, if it is only a question.
        remedy: What to change; an imperative.
        nature: Of its findings.
        explains: Ids of mistakes that follow from it: they are not listed beside it.
        is_gradient: Whether it names a difference between the gradient and that of one process.
        is_late: Whether it appears in what comes after the steps: validation, files, a resume.
    """

    id: str
    title: str
    measured: str
    remedy: str
    nature: Nature = Nature.MEASURED
    explains: tuple[str, ...] = ()
    is_gradient: bool = False
    is_late: bool = False


def ids(text: str) -> tuple[str, ...]:
    """Return the ids of a list in one string."""
    return tuple(text.split())


def by_id(*mistakes: Mistake) -> dict[str, Mistake]:
    """Return mistakes by their id."""
    return {one.id: one for one in mistakes}


@dataclass(frozen=True)
class Finding:
    """A mistake in the user's script.

    Attributes:
        mistake: Its kind.
        lines: "FILE:LINE" of the code to look at, the most important one first, each once.
        ranks: The ranks concerned; empty if all are.
        step: Optimizer step of the first occurrence, counted from 1; None if it is not of a step.
        layer: Name of a parameter or layer; "" if it is not of a layer.
        text: What was observed, in sentences with values.
        values: The same for machines.
        remedy: What to change in this script, if more is known than ``mistake.remedy``.
        nature: Of this finding, if another than that of ``mistake``.
        meant: Name in ``MEANT``, for ``Nature.MEANT``.
        is_accepted: Whether the user accepts it (``--accept``).
        difference: The difference from one process that it names.
    """

    mistake: Mistake
    lines: list[str]
    text: str
    ranks: list[int] = field(default_factory=list)
    step: int | None = None
    layer: str = ""
    values: dict[str, float | int | str] = field(default_factory=dict)
    remedy: str = ""
    nature: Nature | None = None
    meant: str = ""
    is_accepted: bool = False
    difference: Difference | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [one for one in dict.fromkeys(self.lines) if one])

    @property
    def kind(self) -> Nature:
        """What it is based on."""
        return self.nature or self.mistake.nature

    @property
    def is_question(self) -> bool:
        """Whether the answer depends on what is wanted."""
        return self.kind is Nature.QUESTION

    @property
    def is_wrong(self) -> bool:
        """Whether N ranks do not train what one process does: the exit code is 1."""
        is_usual = bool(self.meant) and MEANT[self.meant].is_usual
        is_excused = self.kind is Nature.MEANT and (self.is_accepted or is_usual)
        return not self.is_question and not is_excused
