"""Train and evaluate on one rank what several ranks have: the same global batches, step by step."""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.weak import WeakIdKeyDictionary

from ...record.hooks.batch_size import samples_in
from ...record.hooks.import_hooks import after_import
from ...record.hooks.taps import LOADER_LENGTH, Function, on_step
from ..facts.ranks import RankFacts, read_facts
from ..facts.samples import LoaderFacts, PassFacts, Phase
from ..facts.steps import BackwardFacts, StepFacts
from ..generators import restore_generators
from ..observation import Observation
from ..optimization.models import Model
from ..optimization.steps import Steps, momentum_of
from ..samples.contents import length_of
from ..samples.loaders import Loaders, OpenPass, dataset_of
from .joined_batches import (
    CANNOT_JOIN,
    SampleKey,
    collate_again,
    has_rows,
    join_batches,
    join_once,
    permute_batch,
    sample_keys,
)
from .stored_run import batch_path, batch_paths, load_batch, perturb, restore_initial

# Add up the gradients of a global batch over its parts, where one rank can't hold all of it.
#
# The script trains each part as a batch: a backward and a step of the optimizer. Steps before the
# last part find no gradients, so they change nothing. The last one finds the weighted sum.


_ACCUMULATION = "the accumulation of a global batch"
Place = tuple[int, int, int]  # loader, pass, and number of a batch in its pass


@dataclass(frozen=True)
class Part:
    """A part of a global batch.

    Attributes:
        path: File of the stored batch.
        whole: Place of the global batch in the stored run.
        weight: Number of its samples, relative to those of the global batch.
        is_first, is_last: Whether it is the first part, and the last one.
        samples: Number of its samples.
    """

    path: Path
    whole: Place
    weight: float
    is_first: bool
    is_last: bool
    samples: int


class Accumulation:
    """The gradients of the parts of a step.

    Args:
        observation: Knows the batches.
        steps: Know the optimizers.
        stored: The facts of the stored run.
        stop: Ends the run with a reason; it does not return.
    """

    def __init__(
        self, observation: Observation, steps: Steps, stored: RankFacts, stop: Callable[[str], None]
    ) -> None:
        self._observation, self._steps, self._stored = observation, steps, stored
        self._stop = stop
        self._sums: WeakIdKeyDictionary = WeakIdKeyDictionary()  # gradients by parameter
        self._parts: dict[Place, Part] = {}  # by place in this run
        self._is_held = False

    def install(self) -> None:
        """Register the hooks. Must precede those of the steps."""
        self._steps.weight = self._weight
        self._steps.is_held = lambda: self._is_held
        self._steps.clipping.skips = self._skips_clipping
        on_step(before=self._before_step)

    def add_part(self, place: Place, part: Part) -> None:
        """Note which part of which batch a loader returns next, at a place of this run."""
        self._parts[place] = part

    def _part_of(self, batches: list[int]) -> Part | None:
        """Return the part that the last of some batches of this run is."""
        if not batches:
            return None
        return self._parts.get(self._observation.facts.batches[batches[-1]].place)

    def _weight(self, backward: BackwardFacts) -> float:
        """Return the weight of a backward in the gradient of the global batch."""
        parts = [self._part_of([at]) for at in backward.batches]
        weights = {part.weight for part in parts if part is not None}
        if len(weights) > 1:
            self._stop("a backward of several batches of different sizes can't be accumulated")
        if not weights or _is_sum(backward):
            return 1.0
        return weights.pop()

    def _is_complete(self, optimizer: int) -> bool:
        """Return whether the last backward was that of the last part of the optimizer's step."""
        part = self._part_of(self._observation.last_batches)
        count = self._steps.count_of(optimizer)
        stored = next((x for x in self._stored.steps if x.key == (optimizer, count)), None)
        if stored is None:
            return True  # the replay ends with this step
        batches = [at for one in stored.backwards for at in one.batches]
        if part is None or not batches:
            self._stop("the batches of a step are not known, so they can't be accumulated")
            return True
        return part.is_last and part.whole == self._stored.batches[batches[-1]].place

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Hold a step back, or give it the sum of all parts."""
        if not self._observation.is_observed:
            return None
        changed = self._run_closure(optimizer, args, kwargs)
        self._observation.guarded(_ACCUMULATION, self._hold_or_merge)(optimizer)
        return changed

    def _run_closure(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Call the step's closure; return the arguments with its result in its place."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        if type(optimizer).__name__ == "LBFGS":
            self._stop("LBFGS computes gradients several times in a step")
        with torch.enable_grad():
            loss = closure()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], lambda: loss, *args[2:]), rest

    def _hold_or_merge(self, optimizer: Optimizer) -> None:
        if len({one.optimizer for one in self._stored.steps}) > 1:
            self._stop("the script has several optimizers, whose steps depend on each other")
        self._is_held = not self._is_complete(self._steps.key_of(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self._is_held:
                    self._collect(parameter)
                else:
                    self._merge(parameter)

    def _collect(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)
        else:
            self._sums[parameter] = parameter.grad.detach().clone()
        parameter.grad = None

    def _merge(self, parameter: torch.Tensor) -> None:
        held = self._sums.pop(parameter, None)
        if held is None:
            return
        if parameter.grad is None:
            parameter.grad = held
        else:
            with torch.no_grad():
                parameter.grad.add_(held)

    def _skips_clipping(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether gradients are not complete yet; complete those that are to be clipped."""
        if not self._is_complete(0 if not self._stored.steps else self._stored.steps[0].optimizer):
            return True
        for parameter in parameters:
            self._merge(parameter)
        return False


def _is_sum(backward: BackwardFacts) -> bool:
    """Return whether the loss is a sum over samples that the script does not divide."""
    if backward.reduction != "sum" or backward.loss is None:
        return False
    return math.isclose(backward.root / backward.scale, backward.loss, rel_tol=1e-5)


def weights_of(samples: list[int]) -> list[float]:
    """Return the weight of each part from its number of samples; equal ones if none has any."""
    total = math.fsum(samples)
    return [one / total if total else 1 / len(samples) for one in samples]


_HOOK = "the replay"


class Replay:
    """The replay of a stored run in this process.

    The first training forward begins with the stored parameters. Loaders return the stored
    batches: each those of all ranks, or of an equal share of them if several ranks replay. A batch
    that is trained in parts draws the random numbers of the ranks. Each step uses the learning
    rates and momenta of the stored run.

    Args:
        observation: Its settings have the folder of the stored run.
        steps: Know the optimizers.
        loaders: Note the batches.
        end: Ends the run; it does not return.
    """

    def __init__(
        self, observation: Observation, steps: Steps, loaders: Loaders, end: Callable[[], None]
    ) -> None:
        self._observation, self._steps, self._end = observation, steps, end
        self.loaders = loaders
        self._folder = Path(observation.settings.replays)
        facts = observation.facts
        ranks = read_facts(self._folder, 0).size
        self._ranks = [rank for rank in range(ranks) if rank * facts.size // ranks == facts.rank]
        self._stored: RankFacts = read_facts(self._folder, self._ranks[0])
        self._permutes = observation.settings.permutes
        self._rates: dict[tuple[int, int], StepFacts] = {one.key: one for one in self._stored.steps}
        self._own: list[tuple[float, float]] = []  # learning rate and momentum of each group
        joins = not (observation.settings.accumulates or observation.settings.permutes)
        self._evaluations = Evaluations(self._folder, self._ranks, loaders, joins)
        self.accumulation: Accumulation | None = None
        self._part: Part | None = None  # that a loader returns now
        if observation.settings.accumulates:
            self.accumulation = Accumulation(observation, steps, self._stored, self._stop)

    def install(self) -> None:
        """Set the learning rates of each step, and restore those of the script afterwards.

        Must precede the installation of the steps.
        """
        if self.accumulation is not None:
            self.accumulation.install()
        else:
            self._evaluations.install()
        after_import({"paceline.data.sampling.shard_loader": self._share})
        self._steps.before_step.append(self._set_rates)
        self._steps.after_step.append(self._restore_rates)

    def _share(self, module: Any) -> None:
        """Let ``world.shard`` have the global batches of the ranks, and all parts of one its share.

        A replay that does not join the batches of evaluations has the script's own ones there.
        """
        make = module.ShardedLoader.__init__
        size, joins = self._stored.size, self._evaluations.joins

        @functools.wraps(make)
        def init(sharded: Any, *args: Any, **options: Any) -> None:
            if joins or not options.get("every_sample_once"):
                options["full_ranks"] = size
            make(sharded, *args, **options)

        def paired(loader: Any, shares: Iterator[Any]) -> Iterator[Any]:
            batches, share = iter(loader.loader), None
            if not isinstance(batches, _StoredBatches):
                yield from zip(batches, shares, strict=True)
                return
            for batch in batches:
                if self._part is None or self._part.is_first:
                    share = next(shares)
                yield batch, share

        module.ShardedLoader.__init__, module.ShardedLoader.paired = init, paired

    def set_initial(self, model: Model) -> None:
        """Set a model's parameters before its first training forward."""
        reason = restore_initial(self._folder, model)
        if reason:
            self._stop(reason)
        root = model.module()
        if root is not None and self._permutes:
            perturb(root, self._observation.settings.last_bits)
        if self.accumulation is not None and root is not None:
            for name, one in root.named_modules():
                if isinstance(one, nn.SyncBatchNorm) or hasattr(one, "has_global_statistics"):
                    self._stop(
                        f"the statistics of {name} are those of the global batch, of which only "
                        "parts fit on one rank"
                    )

    def _stop(self, reason: str) -> None:
        """End the run, which can't be replayed."""
        self._observation.add_unseen(f"the replay: {reason}")
        self._end()

    def _set_rates(self, optimizer: Optimizer) -> None:
        key = self._steps.key_of(optimizer)
        stored = self._rates.get((key, self._steps.count_of(key)))
        if stored is None:
            self._end()
            return
        groups = optimizer.param_groups
        self._own = [(float(one.get("lr", math.nan)), momentum_of(one)) for one in groups]
        if len(stored.learning_rates) == len(self._own):
            values = zip(groups, stored.learning_rates, stored.momenta, strict=True)
            for group, rate, momentum in values:
                _set_rate(group, rate, momentum)

    def _restore_rates(self, optimizer: Optimizer, step: StepFacts) -> None:
        own, self._own = self._own, []
        for group, (rate, momentum) in zip(optimizer.param_groups, own, strict=False):
            _set_rate(group, rate, momentum)

    # Batches

    def iterator(self, loader: Any, opened: OpenPass) -> Any:
        """Return the iterator that replaces that of a loader in a pass.

        None if the pass evaluates samples that can't be joined: it has the script's own batches.
        """
        key, pass_number = opened.loader.key, opened.facts.number
        stored = self._stored.loader(key)
        passes = stored.passes if stored is not None else []
        if pass_number >= len(passes):
            self._end()
        if passes[pass_number].phase is Phase.TRAINING:
            return _StoredBatches(self, loader, self.batches(opened, passes[pass_number]))
        joined = self._evaluations.batches(key, pass_number)
        if joined is None:
            return None
        keep_all_results(loader)
        return _StoredBatches(self, loader, iter(joined))

    def batches(self, opened: OpenPass, one: PassFacts) -> Iterator[Any]:
        """Yield the batches of a pass: joined, or in parts."""
        key, yielded = opened.loader.key, itertools.count()
        for number in itertools.count():
            paths = batch_paths(self._folder, (key, one.number, number), self._ranks)
            if not paths:
                if not self._is_over(key, one, number):
                    self._end()  # not stored, or where the stored run ended
                return
            after = batch_paths(self._folder, (key, one.number, number + 1), self._ranks)
            is_last = not after and self._is_over(key, one, number + 1)
            try:
                if self.accumulation is None:
                    opened.is_at_end = is_last
                    yield self._joined(opened, paths, (key, one.number, number))
                else:
                    for part in self._parts(paths, (key, one.number, number)):
                        self._part = part
                        self.accumulation.add_part((key, opened.facts.number, next(yielded)), part)
                        opened.is_at_end = is_last and part.is_last
                        opened.samples = part.samples
                        yield self._batch_of(part, number)
            except ValueError as error:
                self._stop(f"{CANNOT_JOIN}: {error}")

    def _joined(self, opened: OpenPass, paths: list[Path], place: Place) -> Any:
        """Return a global batch. Raises ValueError: it can't be made of those of the ranks."""
        loader, opened.samples = opened.source, None
        batches, indices = [load_batch(path)[0] for path in paths], self._indices(place)
        seed = place[-1] if self._permutes else None
        may_collate = loader.batch_sampler is not None and len(batches) == len(indices)
        try:
            if may_collate and not all(map(has_rows, batches, indices)):
                raise ValueError("a row of a tensor is no sample")
            joined = join_batches(batches)
            return joined if seed is None else permute_batch(joined, seed)
        except ValueError as error:
            if not may_collate:
                raise
            reason = error
        try:
            batch = collate_again(loader, batches, indices, seed)
        except ValueError as error:
            raise ValueError(f"{reason}; {error}") from None
        self._observation.facts.is_collated = True
        opened.samples = sum(len(one or ()) for one in indices)
        return batch

    def _indices(self, place: Place) -> list[list[int] | None]:
        """Return the positions of the samples of each rank's batch, as far as they are known."""
        return [
            next((x.indices for x in facts.batches if x.place == place), None)
            for facts in self._evaluations.ranks
        ]

    def _parts(self, paths: list[Path], whole: Place) -> list[Part]:
        """Return the parts of a global batch."""
        facts = self._observation.facts
        facts.parts = max(facts.parts, len(paths))
        samples, known = [samples_in(load_batch(path)[0]) for path in paths], self._indices(whole)
        if len(known) == len(paths):
            samples = [len(x) if x else n for x, n in zip(known, samples, strict=True)]
        return [
            Part(path, whole, weight, path == paths[0], path == paths[-1], number)
            for path, weight, number in zip(paths, weights_of(samples), samples, strict=True)
        ]

    def _batch_of(self, part: Part, seed: int) -> Any:
        """Return the batch of a part, with the generators as the script received it.

        Rows that are no samples, such as nodes of graphs, belong together: they are not permuted.
        """
        batch, states = load_batch(part.path)
        restore_generators(states)
        if self._permutes and samples_in(batch) == part.samples:
            with suppress(ValueError):  # of an object of the script
                return permute_batch(batch, seed)
        return batch

    def _is_over(self, key: int, one: PassFacts, number: int) -> bool:
        """Return whether the stored run had so many batches of a pass, and went on after it."""
        stored = self._stored.loader(key)
        assert stored is not None
        went_on = one.is_complete or one.is_read or one.planned is not None
        went_on = went_on or one.number + 1 < len(stored.passes)
        return number >= one.batches and (self._stored.ended == "script" or went_on)


class _StoredBatches(torch_dataloader._BaseDataLoaderIter):
    """An iterator over stored batches."""

    def __init__(self, replay: Replay, loader: Any, batches: Iterator[Any]) -> None:
        self._replay, self._batches = replay, batches
        self._dataset, self._num_yielded, self._length = loader.dataset, 0, length_of(loader) or 0

    def __next__(self) -> Any:
        return self._replay.loaders.fetch(self, _StoredBatches._read)

    def _read(self) -> Any:
        batch = next(self._batches)
        self._num_yielded += 1
        return batch

    def __len__(self) -> int:
        return self._length

    def __del__(self) -> None:
        """Nothing to end: there are no workers."""


def _set_rate(group: dict[str, Any], rate: float, momentum: float) -> None:
    if momentum != momentum_of(group):  # also if it is NaN: there is none
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        elif "momentum" in group:
            group["momentum"] = momentum
    if isinstance(group.get("lr"), torch.Tensor):
        group["lr"].fill_(rate)
    elif "lr" in group:
        group["lr"] = rate


# Evaluations: each sample once.
#
# A replay joins the batches of the ranks that have the same place in a pass. Samples that several
# ranks evaluate, or that a sampler has added, are left out after the first time, as one process has
# them only once. Another replay evaluates the script's own batches: a value that depends on how
# samples are cut into batches differs then.


class Evaluations:
    """The evaluations of a stored run.

    Args:
        folder: Folder of the stored run.
        ranks: Ranks of the stored run that this process stands for.
        loaders: Know where loaders were made.
        joins: Whether batches are joined; else the script's own batches are evaluated.
    """

    def __init__(self, folder: Path, ranks: list[int], loaders: Loaders, joins: bool) -> None:
        self._folder, self._numbers, self._loaders = folder, ranks, loaders
        self.joins = joins
        self._joined: dict[tuple[int, int], list[Any] | None] = {}

    @cached_property
    def ranks(self) -> list[RankFacts]:
        """The facts of the ranks that this process stands for."""
        return [read_facts(self._folder, rank) for rank in self._numbers]

    def install(self) -> None:
        """Let a loader have as many batches as it had on each of the ranks.

        Scripts divide sums of losses by this number.
        """

        def len_of(length: Function, loader: Any) -> int:
            found = self._length_on_ranks(loader)
            return int(length(loader)) if found is None else found

        LOADER_LENGTH.around(len_of)

    def _length_on_ranks(self, loader: Any) -> int | None:
        """Return the number of batches of a rank's pass; None if it is not known."""
        stored = self._stored(loader)
        if stored is None or any(
            one.phase is not Phase.TRAINING and self.batches(stored.key, one.number) is None
            for one in stored.passes
        ):
            return None
        lengths = {len(one.planned) for one in stored.passes if one.planned is not None}
        return lengths.pop() if len(lengths) == 1 else None

    def _stored(self, loader: Any) -> LoaderFacts | None:
        """Return the facts of the same loader on the ranks; None if it is not known.

        A line can make several loaders (``accelerator.prepare``). Before its first pass, a loader
        is told from the others by the number of samples.
        """
        stored = self.ranks[0].loaders
        own = self._loaders.keys.get(loader)
        if own is not None:
            return self.ranks[0].loader(own.key)
        line, samples = self._loaders.line_of(loader), length_of(dataset_of(loader))
        known = [x for x in stored if line and (x.line, x.dataset_length) == (line, samples)]
        return known[0] if len(known) == 1 else None

    def batches(self, key: int, number: int) -> list[Any] | None:
        """Return the joined batches of a pass; None if they are not stored, or can't be joined.

        Args:
            key: Of the loader.
            number: Of the pass.
        """
        if not self.joins:
            return None
        if (key, number) not in self._joined:
            try:
                self._joined[key, number] = self._join(key, number)
            except (ValueError, OSError):
                self._joined[key, number] = None
        return self._joined[key, number]

    def _join(self, key: int, number: int) -> list[Any] | None:
        parts: list[list[tuple[Any, list[SampleKey]]]] = []  # batches, and keys of samples
        of_rows = True
        for rank, facts in zip(self._numbers, self.ranks, strict=True):
            loader = facts.loader(key)
            if loader is None or number >= len(loader.passes):
                continue
            if loader.line != self.ranks[0].loaders[key].line:
                return None
            every = [x for x in facts.batches if x.pass_key == (key, number)]
            if len(every) != loader.passes[number].batches:
                return None
            keys = [sample_keys(one, loader) for one in every]
            if keys and keys in [[each for _, each in one] for one in parts]:
                continue  # all samples, also without positions
            paths = [batch_path(self._folder, (key, number, x.number), rank) for x in every]
            batches = [load_batch(path)[0] for path in paths]
            of_rows &= all(has_rows(a, b.indices) for a, b in zip(batches, every, strict=True))
            parts.append(list(zip(batches, keys, strict=True)))
        if len(parts) > 1 and not of_rows:
            return None  # such as graphs, whose numbers are those within a batch
        seen: set[SampleKey] = set()
        found = []
        for at in range(max(map(len, parts), default=0)):
            batch = join_once([one[at] for one in parts if at < len(one)], seen)
            if batch is not None:
                found.append(batch)
        return found


def keep_all_results(loader: Any) -> None:
    """Let accelerate's ``gather_for_metrics`` remove no results of the batches of a loader.

    It removes those of samples that its sampler repeats in the last batch, counted in batches of
    the script. Joined batches have each sample once.
    """
    state: Any = sys.modules.get("accelerate.state")
    active: Any = state.GradientState().active_dataloader if state is not None else None
    if loader is not None and getattr(active, "base_dataloader", None) is loader:
        active.remainder = 0
