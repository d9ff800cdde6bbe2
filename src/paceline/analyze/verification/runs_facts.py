"""The runs of ``paceline verify``: what the rules read."""

from dataclasses import dataclass, field

from ...observe.facts.ranks import RankFacts


@dataclass(frozen=True)
class ResumeError:
    """The failure of a script that was started again with its own checkpoint.

    Attributes:
        short: The error in one line.
        lines: "FILE:LINE" of the user's code that failed, the innermost first.
        is_restoring: Whether it failed while it restored a state (``load_state_dict``).
    """

    short: str
    lines: list[str]
    is_restoring: bool


@dataclass
class VerifyRuns:
    """The facts of all runs.

    Attributes:
        ranks: The script on N ranks, by rank.
        replay: One rank that trained, in each step, the samples of all ranks; None if it did not
            run.
        permuted: The same with the samples of each step in another order. Its differences from
            ``replay`` are those of rounding.
        cut: One rank that trained the batches of the ranks one after the other; None if the replay
            does not differ, or trains them so itself.
        joint: One rank that trained the first global batches as a whole, with other random numbers
            than the ranks, for its losses; None if ``replay`` does not train parts.
        again: What stands for ``replay`` once more, without a change. What differs between both
            varies from run to run.
        alone: The unchanged script on one rank, with its own batch size.
        resumed: The script started again after it saved a checkpoint, by rank.
        resume_error: Why that failed; None if it did not.
        interrupted: The run that saved this checkpoint, and ended after one pass; None if
            ``ranks`` did.
        is_continued: Whether ``interrupted``, and not ``ranks``, is the run without a break with
            which the resumed run is compared.
        notes: What the runs could not do, each with its reason; sentences without full stop.
        replay_peers: The second rank of the replay where one rank can't hold the model.
        is_too_large: Whether neither one rank nor two can hold the model.
        command: Script and arguments.
        seconds: Duration of all runs.
    """

    ranks: list[RankFacts]
    replay: RankFacts | None = None
    permuted: RankFacts | None = None
    alone: RankFacts | None = None
    again: RankFacts | None = None
    resumed: list[RankFacts] | None = None
    resume_error: ResumeError | None = None
    interrupted: list[RankFacts] | None = None
    is_continued: bool = False
    notes: list[str] = field(default_factory=list)
    replay_peers: list[RankFacts] = field(default_factory=list)
    is_too_large: bool = False
    command: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cut: RankFacts | None = None
    joint: RankFacts | None = None

    @property
    def single(self) -> RankFacts | None:
        """The script on one rank: with its own batch size, else with the global batch.

        A replay in parts or on two ranks has other steps than one process.
        """
        replay = self.replay
        if replay is not None and (self.replay_peers or replay.parts > 1):
            replay = None
        return self.alone or replay
