"""What several rules read of the runs: computed once."""

from collections.abc import Sequence
from functools import cached_property

from ...observe.facts.events import CollectiveFacts
from ...observe.facts.models import FLAT, ModelFacts
from ...observe.facts.ranks import RankFacts
from ...observe.facts.samples import Phase
from .comparison import Comparison, Difference, compare
from .exchange import Exchange, exchange_of
from .passes import Stream, streams
from .replayed_steps import ReplayedSteps
from .runs_facts import VerifyRuns
from .steps import JointStep, StepKey, joint_steps, usual_backwards

MOST_OF_STEPS = 0.5  # of the steps, or of the batches
SHARDING = {"FSDP2", FLAT}  # wrappers whose ranks train different samples


class JoinedRuns:
    """The runs of ``paceline verify``, joined over the ranks."""

    def __init__(self, runs: VerifyRuns) -> None:
        self.runs = runs
        self.ranks: Sequence[RankFacts] = runs.ranks
        self.size = len(runs.ranks)
        self.notes: list[str] = []
        self.averages_parameters = False  # instead of gradients, between some steps (local SGD)
        is_unchanged = runs.replay is not None and runs.replay is runs.alone
        self.replay = ReplayedSteps(
            *(runs.ranks, runs.replay, runs.permuted, runs.replay_peers),
            has_own_batches=is_unchanged,
        )

    @cached_property
    def steps(self) -> list[JointStep]:
        """Steps of all ranks."""
        return list(joint_steps(self.ranks))

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """The relation of each step whose gradients are known."""
        return [found for step in self.steps if (found := exchange_of(step)) is not None]

    @cached_property
    def exchange_by_step(self) -> dict[StepKey, Exchange]:
        """The same by the key of the step."""
        return {one.step.key: one for one in self.exchanges}

    @cached_property
    def comparison(self) -> Comparison:
        """The training beside that of one process with the same samples."""
        if self.is_model_parallel:
            return Comparison(reason="the ranks hold different parts of the model")
        if self.averages_parameters:
            return Comparison(reason="the ranks average parameters, and not gradients")
        lines = self.value_lines()
        found = compare(self.runs, self.steps, self.replay, self.exchange_by_step, lines)
        self.notes += found.notes
        return found

    @property
    def replayed(self) -> list[JointStep]:
        """The steps that are compared with one process."""
        return self.comparison.steps

    @property
    def difference(self) -> Difference | None:
        """The first difference from one process that is not confirmed to be meant."""
        return self.comparison.difference

    @cached_property
    def reference(self) -> ReplayedSteps:
        """One process that trains the ranks' batches in turn, if it was run; else the replay."""
        cut = ReplayedSteps(self.runs.ranks, self.runs.cut, None)
        return cut if any(cut.joint(step) for step in self.steps[:1]) else self.replay

    @cached_property
    def accumulated(self) -> dict[int, int]:
        """By optimizer, the number of backwards of most steps."""
        keys = {step.optimizer for step in self.steps}
        return {
            key: usual_backwards([one for one in self.steps if one.optimizer == key])
            for key in keys
        }

    @cached_property
    def training(self) -> list[Stream]:
        """Streams of training batches."""
        return streams(self.ranks, Phase.TRAINING)

    @cached_property
    def evaluation(self) -> list[Stream]:
        """Streams of evaluation batches."""
        every = streams(self.ranks, Phase.EVALUATION)
        return [one for one in every if one.first.loader.dataset or not self._is_teacher(one)]

    def _is_teacher(self, stream: Stream) -> bool:
        """Return whether a model without gradient is part of the training.

        It is called in most steps, or with the batches of the training.
        """
        facts = self.ranks[min(stream.loaders)]
        if len(stream.passes) > max(MOST_OF_STEPS * len(facts.steps), 1):
            return True
        used = facts.without_evaluated(range(len(facts.batches)))
        trained = {tuple(column) for at in used for column in facts.batches[at].contents}
        read = [
            {tuple(column) for column in batch.contents}
            for one in stream.passes
            if facts.rank in one.ranks
            for batch in one.ranks[facts.rank].batches
        ]
        return sum(bool(one & trained) for one in read) > MOST_OF_STEPS * len(read)

    @property
    def unbroken(self) -> Sequence[RankFacts]:
        """The run without a break with which the resumed run is compared."""
        interrupted = self.runs.interrupted if self.runs.is_continued else None
        return interrupted or self.ranks

    @cached_property
    def unbroken_training(self) -> list[Stream]:
        """Streams of training batches of the run without a break."""
        return streams(self.unbroken, Phase.TRAINING)

    @property
    def saving(self) -> Sequence[RankFacts]:
        """The run whose checkpoint the resumed run finds."""
        return self.runs.interrupted or self.ranks

    def is_flat(self, name: str) -> bool:
        """Return whether a parameter ("MODEL KEY/NAME") is of a model with flat parameters."""
        key = name.partition("/")[0]
        return any(str(x.key) == key and x.wrapper == FLAT for x in self.ranks[0].models)

    def model(self, key: int, rank: int = 0) -> ModelFacts | None:
        """Return a model of a rank."""
        return next((one for one in self.ranks[rank].models if one.key == key), None)

    @cached_property
    def is_model_parallel(self) -> bool:
        """Whether ranks hold different parts of the model and work on the same samples."""
        models = [model for facts in self.ranks for model in facts.models]
        if any(one.is_sharded and one.wrapper not in SHARDING for one in models):
            return True
        trained = {
            name.partition("/")[0] for f in self.ranks for one in f.steps for name in one.gradients
        }
        shapes = [
            {
                (model.key, p.name): tuple(p.shape)
                for model in facts.models
                if not model.is_sharded and str(model.key) in trained  # others on some ranks only
                for p in model.parameters
            }
            for facts in self.ranks
        ]
        return any(one != shapes[0] for one in shapes) or self.has_all_to_all

    @cached_property
    def has_all_to_all(self) -> bool:
        """Whether the training exchanges activations between experts."""
        return any(
            one.kind.startswith("alltoall") and one.phase is Phase.TRAINING
            for facts in self.ranks
            for one in facts.collectives
        )

    def seed_lines(self, generator: str, are_equal: bool) -> list[str]:
        """Return lines that seeded a generator before the training, the last one first.

        are_equal: Lines that gave all ranks the same seed, or those that gave them different ones.
        """
        by_rank: list[dict[str, int]] = []
        for facts in self.ranks:
            seeds = [one for one in facts.seeds if one.step == 0 and one.line]
            kinds = ("torch", "own") if generator in ("torch", "cuda") else (generator,)
            kinds = ("own",) if ":" in generator else kinds  # an object of the script
            by_rank.append({one.line: one.value for one in seeds if one.generator in kinds})
        found = []
        for line, value in by_rank[0].items():
            others = [one.get(line) for one in by_rank[1:]]
            if None not in others and all(one == value for one in others) is are_equal:
                found.append(line)
        return found[::-1]

    def seed_lines_of_ranks(self) -> list[str]:
        """Return lines that gave each rank another seed."""
        kinds = ("torch", "numpy", "python")
        return [line for one in kinds for line in self.seed_lines(one, are_equal=False)]

    def change_lines(self, step: JointStep) -> list[str]:
        """Return the lines of the script that change gradients after a backward, in order.

        Calls that clip are left out. Only the first steps were looked at.
        """
        of_optimizer = [one for one in self.ranks[0].steps if one.optimizer == step.optimizer]
        known = next((one for one in of_optimizer if one.gradient_lines), None)
        clips = {clip.line for one in of_optimizer for clip in one.clips}
        return [line for line in known.gradient_lines if line not in clips] if known else []

    def lines_before_exchange(self, step: JointStep) -> list[str]:
        """Return the lines that change gradients between the backward and the exchange.

        If a script exchanges copies, none is known: gradients change when they are written back.
        """
        exchanges, found = set(self.gradient_lines()), []
        changes = self.change_lines(step)
        if exchanges and not exchanges & set(changes):
            return []
        for line in changes:
            if line in exchanges:
                break
            found.append(line)
        return found

    def lines_after_exchange(self, step: JointStep) -> list[str]:
        """Return lines that may change gradients after their exchange, the most likely first.

        If a script exchanges copies, the line that writes them back is not the one that computes.
        """
        exchanges, changes = self.gradient_lines(), self.change_lines(step)[::-1]
        is_copied = exchanges and not set(exchanges) & set(changes)
        return [*exchanges, *changes] if is_copied else [*changes, *exchanges]

    def hook_lines(self, step: JointStep) -> list[str]:
        """Return the lines that registered hooks on the gradients of a step's model."""
        return [line for model in self._models_of(step) for line in model.hook_lines]

    def exchange_hook_lines(self, step: JointStep) -> list[str]:
        """Return the lines that registered a communication hook of a step's model."""
        return [line for model in self._models_of(step) for line in model.exchange_hook_lines]

    def _models_of(self, step: JointStep) -> list[ModelFacts]:
        keys = {name.partition("/")[0] for name in step.names}
        return [model for model in self.ranks[0].models if str(model.key) in keys]

    def value_lines(self) -> list[str]:
        """Return lines that exchange other values than gradients, in most steps of the training."""
        gradients = self.gradient_lines()
        steps: dict[str, set[int]] = {}
        for one in self.ranks[0].collectives:
            is_other = not one.is_in_backward and one.line and one.line not in gradients
            if is_other and one.phase is Phase.TRAINING:
                steps.setdefault(one.line, set()).add(one.step)
        return [line for line, each in steps.items() if len(each) > MOST_OF_STEPS * len(self.steps)]

    def gradient_lines(self) -> list[str]:
        """Return the lines of the script that exchange gradients, the largest exchange first.

        FSDP2 gathers parameters in lines of the forward, and reduces gradients in the backward.
        """
        nbytes: dict[str, int] = {}
        if any(model.wrapper in SHARDING for model in self.ranks[0].models):
            return []
        for one in self.ranks[0].collectives:
            if one.line and one.phase is Phase.TRAINING and is_reduction(one):
                nbytes[one.line] = nbytes.get(one.line, 0) + one.nbytes
        elements = sum(p.shard_numel for m in self.ranks[0].models for p in m.parameters)
        large = [line for line in nbytes if nbytes[line] >= elements]  # no losses or metrics
        return sorted(large, key=lambda line: -nbytes[line])


def is_reduction(one: CollectiveFacts) -> bool:
    """Return whether a collective combines values of the ranks."""
    return one.kind.startswith(("allreduce", "reduce", "allgather", "gather"))


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """Return ranks in words: "All ranks", "Rank 2", "Ranks 0 to 3", "Ranks 0, 2 and 5"."""
    ranks = sorted(ranks)
    if len(ranks) == size and size > 2:
        return f"All {size} ranks"
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"Ranks {ranks[0]} to {ranks[-1]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names in words, the first few of many."""
    if len(names) == 1:
        return names[0]
    if len(names) <= most:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{', '.join(names[:most])} and {len(names) - most} more"
