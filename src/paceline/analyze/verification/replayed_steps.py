"""The training of N ranks beside its replay on one rank with the same samples."""

from collections.abc import Sequence
from functools import cached_property

from ...observe.facts.events import DrawFacts
from ...observe.facts.ranks import SKETCH_SIZE, RankFacts
from ...observe.facts.steps import StepFacts
from .relations import EPSILONS, Vectors, distance, epsilon, fit, median, percent
from .steps import JointStep, StepKey, find_step, parameters

NOT_COMPARED = "one rank was not compared at the same global batches"
NOISE_FACTOR = 20.0  # a difference is one from this multiple of the measured rounding noise on
UNMEASURED = 5e-5  # rounding noise that is not measured, relative to the gradient
SAME_STATE = 1e-3  # relative difference of parameters up to which gradients are comparable
AS_ROUNDED = 3.0  # times what rounding makes of the difference of parameters: as good as equal
NEGLIGIBLE_NORM = 1e-4  # of the largest norm of a gradient: one that is so small is rounding
MAX_RESIDUAL = 0.05  # residual up to which two gradients are multiples of each other
SUSPICIOUS_ROUNDINGS = 2000  # of a gradient, from which on the order of samples is no explanation
MAX_NOISE = 0.05  # relative difference that is suspicious for any dtype
OUTSIDE = ("lift_fresh", "lift")  # operators that make a tensor of a value
# Parts of the names of operators that draw random numbers.
DRAWS = ("rand", "normal", "bernoulli", "uniform", "dropout", "multinomial", "exponential")


class ReplayedSteps:
    """Steps of the replay that can be compared with those of N ranks.

    Args:
        ranks: The script on N ranks.
        replay: One rank with the samples of all ranks, or None.
        permuted: The same in another order, or None.
        peers: Further ranks of the replay, where one can't hold the model.
        has_own_batches: Whether ``replay`` is the unchanged script on one rank: steps are compared
            that train the same samples from the same parameters.
    """

    def __init__(
        self,
        ranks: list[RankFacts],
        replay: RankFacts | None,
        permuted: RankFacts | None,
        peers: Sequence[RankFacts] = (),
        has_own_batches: bool = False,
    ) -> None:
        self._has_own_batches = has_own_batches
        self._ranks, self._replay, self._permuted = ranks, replay, permuted
        self._peers = list(peers)

    @property
    def name(self) -> str:
        """What the ranks are compared with, in words."""
        return f"{1 + len(self._peers)} ranks" if self._peers else "one process"

    @property
    def parts(self) -> int:
        """Number of parts in which global batches were trained; 1 for whole ones."""
        return self._replay.parts if self._replay is not None else 1

    @property
    def in_parts(self) -> bool:
        """Whether global batches were trained in the parts of the ranks, one after the other."""
        return self.parts > 1

    @cached_property
    def obstacle(self) -> str:
        """Why gradients cannot be compared one by one; "" if they can."""
        if self._replay is None:
            return "the training was not replayed on one rank"
        if self.in_parts and not self._peers:  # with the batch and the random numbers of each rank
            return self._other_numbers()
        if drawn := draws_of((*self._ranks, self._replay)):
            where = f" in {drawn[0].line}" if drawn[0].line else ""
            return f"the model draws random numbers{where}, and ranks draw others than one process"
        return ""

    def _other_numbers(self) -> str:
        """Return which random numbers of the ranks one process did not draw again; "" if none."""
        assert self._replay is not None
        states = {
            (one.place, one.generator, one.loader, one.state)
            for facts in self._ranks
            for one in facts.draws
        }
        first = {
            (one.place, one.generator, one.loader): one.state
            for one in self._ranks[0].draws
            if one.number == 0 and one.place == "forward"
        }
        for one in draws_of([self._replay]):
            key = (one.place, one.generator, one.loader)
            is_first = one.number == 0 and one.place == "forward"
            expected = first.get(key, one.state) if is_first else one.state
            if (*key, one.state) not in states or one.state != expected:
                where = f" in {one.line}" if one.line else ""
                return f"one process could not draw the random numbers of the ranks again{where}"
        return ""

    def step(self, step: JointStep) -> StepFacts | None:
        """Return the same step of the replay if it trained as many samples."""
        if self._replay is None:
            return None
        found = find_step(self._replay.steps, step.key)
        if found is None:
            return None
        theirs = self._joint(step.key)
        own = sum(theirs.samples) if theirs is not None else 0
        whole = sum(step.samples)
        return found if not (own and whole) or own == whole else None

    def joint(self, step: JointStep) -> JointStep | None:
        """Return the same step of the replay, if both started from the same values."""
        if self.step(step) is None or self.obstacle or not self._starts_equal(step):
            return None
        theirs = self._joint(step.key)
        if self._has_own_batches and theirs is not None:
            if not step.contents or step.contents != theirs.contents:
                return None
            ours, other = step.before(0), theirs.before(0)
            if not ours or ours.keys() != other.keys():
                return None
            return theirs if all(distance(ours[n], other[n]) <= SAME_STATE for n in ours) else None
        return theirs

    def twin(self, step: JointStep) -> JointStep | None:
        """Return the same step of the replay whose samples have another order."""
        if self._permuted is None or self._peers:
            return None
        return _joint([self._permuted], step.key)

    def gradients(self, step: JointStep) -> Vectors | None:
        """Return the replay's gradients before clipping, if both started from the same values."""
        theirs = self.joint(step)
        return theirs.unclipped(0) if theirs is not None else None

    def casts(self, step: JointStep) -> set[str]:
        """Return the dtypes of autocast in a step."""
        return {one.autocast for facts in step.steps for one in facts.backwards if one.autocast}

    def multiple(self, step: JointStep, used: Vectors) -> float | None:
        """Return N ranks' gradient as a multiple of the replay's; None if it is none."""
        theirs = self.gradients(step)
        if theirs is None or not (names := [name for name in used if name in theirs]):
            return None
        found = fit(used, theirs, names)
        return found.factor if found.residual <= MAX_RESIDUAL and found.factor > 0 else None

    def noise(self, step: JointStep) -> dict[str, float]:
        """Return the rounding noise of a step by parameter; empty if it was not measured."""
        if self.step(step) is None or self._permuted is None:
            return {}
        assert self._replay is not None
        runs = (self._replay, self._permuted)
        gradients = [x.unclipped(0) for one in runs if (x := _joint([one], step.key))]
        one, two = gradients if len(gradients) > 1 else ({}, {})
        return {name: distance(one[name], two[name]) for name in one if name in two}

    def suspicious_noise(self, step: JointStep) -> float:
        """Return by how much two replays differ in a step; 0 if rounding explains it.

        The median over the parameters, relative.
        """
        noise = median(self.noise(step).values())
        known = parameters(self._ranks[0])
        dtypes = {known[name].dtype for name in step.names if name in known} | self.casts(step)
        rounding = max((epsilon(dtype) for dtype in dtypes), default=epsilon("float32"))
        return noise if noise > min(SUSPICIOUS_ROUNDINGS * rounding, MAX_NOISE) else 0.0

    def hides_differences(self, step: JointStep) -> bool:
        """Return whether the tolerances of a step's gradients exceed these gradients."""
        return NOISE_FACTOR * median(self.noise(step).values()) >= 1

    def tolerances(self, step: JointStep, floor: float = 0.0) -> dict[str, float]:
        """Return the largest difference by parameter that rounding explains.

        floor: Relative difference that the exchange itself is known to make.
        """
        noise = self.noise(step)
        known = parameters(self._ranks[0])
        usual = median(noise.values()) if noise else EPSILONS["float32"]
        least = max([floor, usual, *(epsilon(dtype) for dtype in self.casts(step))])
        if self._permuted is None:
            least = max(least, UNMEASURED)
        return {
            name: NOISE_FACTOR * max(noise.get(name, 0.0), least, 4 * epsilon(one.dtype))
            for name, one in known.items()
        }

    def _starts_equal(self, step: JointStep) -> bool:
        if step.index == 0:
            return True
        key = (step.optimizer, step.index - 1)
        ours, theirs = _joint(step.ranks, key), self._joint(key)
        first = _joint(step.ranks, (step.optimizer, 0))
        if ours is None or theirs is None or first is None:
            return False
        one, two = ours.values(0), theirs.values(0)
        twin = self._permuted and not self._peers and _joint([self._permuted], key)
        again = twin.values(0) if twin else {}
        # A parameter whose gradient is only rounding (a bias before a softmax) moves at random.
        gradients = first.used(0)
        moved = significant(gradients, gradients)
        both = [n for n in one if n in two and (n in moved or n not in gradients)]
        return bool(both) and all(
            distance(one[n], two[n]) <= SAME_STATE
            or (n in again and distance(one[n], two[n]) <= AS_ROUNDED * distance(two[n], again[n]))
            for n in both
        )

    def _joint(self, key: StepKey) -> JointStep | None:
        """Return a step of all ranks of the replay."""
        assert self._replay is not None
        return _joint([self._replay, *self._peers], key)


def draws_of(ranks: Sequence[RankFacts]) -> list[DrawFacts]:
    """Return the random numbers that models and training loops draw."""
    return [
        one
        for facts in ranks
        for one in facts.draws
        if one.place in ("forward", "loop") and one.has_drawn
    ]


def significant(ours: Vectors, theirs: Vectors) -> list[str]:
    """Return the parameters whose gradients are more than rounding."""
    norms = {
        name: max(ours[name][SKETCH_SIZE], theirs[name][SKETCH_SIZE])
        for name in ours
        if name in theirs
    }
    largest = max(norms.values(), default=0.0)
    return [name for name, norm in norms.items() if norm > NEGLIGIBLE_NORM * largest]


def _joint(ranks: Sequence[RankFacts], key: StepKey) -> JointStep | None:
    """Return a step of all ranks; None if one has not made it."""
    steps = [step for facts in ranks if (step := find_step(facts.steps, key)) is not None]
    return JointStep(*key, ranks, steps) if len(steps) == len(ranks) else None


# Does one rank train the same when it trains the same batches again?


def describe_noise(noise: float, traced: Sequence[RankFacts]) -> str:
    """Return what makes two replays differ, and how far it limits the answer.

    Args:
        noise: What ``suspicious_noise`` returned.
        traced: Two runs with the same batches in the same order; fewer if they failed.
    """
    both = zip(*(facts.operators for facts in traced), strict=False) if len(traced) > 1 else ()
    found = next((ours for ours, theirs in both if ours != theirs), None)
    limit = "no difference from one process is seen"
    if NOISE_FACTOR * noise < 1:
        limit = f"a difference from one process below {percent(NOISE_FACTOR * noise)} is not seen"
    if found is None:
        return (
            f"the order of the samples of a batch changes gradients by {percent(noise)} "
            f"(median), more than rounding does, so {limit}"
        )
    where = f" in {found.line}" if found.line else ""
    name = found.name.removeprefix("aten.")
    if name in OUTSIDE:
        why = (
            f"a value that does not come from torch (but from numpy, the time, ...){where} differs "
            "when the same batch is trained again"
        )
    elif any(part in name for part in DRAWS):
        why = f"{name}{where} draws other random numbers each time"
    else:
        why = (
            f"the result of {name}{where} differs when the same batch is trained again: either the "
            "operator is not deterministic, or it reads memory that is changed meanwhile"
        )
    return (
        f"the script is not deterministic: {why}. Gradients differ by {percent(noise)} "
        f"(median) from run to run, so {limit}"
    )
