"""Decide what a training loop does, from the notes of the hooks. Needs no torch.

    fetch  forward  (loss)  backward  step          a training iteration
    fetch  forward in eval mode                     an iteration of an evaluation
    fetch  teacher, forward  (loss)  backward       training: a backward follows
    fetch  forward without gradient                 training, if a backward follows in a later
                                                    iteration of the same loader (outputs that are
                                                    cached first); otherwise an evaluation

What an iteration was is known only at its end or later, so its event is written then. All times
are in ns. Models and optimizers are opaque objects that are compared by identity and never kept
alive. A loader's iterator has a number (its id) that another one may get after its end.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..ring.states import State

# Batches fetched before their backward. If there are more, the script only reads the data.
MAX_BATCHES_AHEAD = 16


class SampleCounter:
    """Counter of the samples of each training step.

    A batch is *ahead* while no backward has followed its fetch, and *claimed* from the backward
    on. A framework that prefetches has fetched more batches before the first step than between
    later ones: batch n + 1 is fetched before batch n is trained. That many batches are held back
    from then on, so that each step counts the batches that it trains.
    """

    def __init__(self) -> None:
        self._ahead: list[int] = []
        self._claimed: list[int] = []  # since the last step
        self._held: list[int] = []  # claimed batches that a later step trains
        self._prefetched: int | None = None  # batches; None until two steps were seen
        self._iterator: object = None  # iterator of the loader that trains
        self._first_step: list[int] | None = None  # batches claimed by the iterator's first step
        self._is_exhausted = False
        self._batches_per_step = 1

    @property
    def holds_batches(self) -> bool:
        """Whether a fetched batch is still to be trained."""
        return bool(self._held)

    def add_ahead(self, samples: int) -> None:
        self._ahead.append(samples)

    def discard_ahead(self) -> None:
        self._ahead = []

    def claim(self, iterator: object, samples: int) -> None:
        """Count a batch, and those fetched before it, as trained by the current step."""
        if iterator is not None and (iterator != self._iterator or self._is_exhausted):
            self._begin_iterator(iterator)
        if len(self._ahead) <= MAX_BATCHES_AHEAD:
            self._claimed += self._ahead
        self._ahead = []
        if samples:
            self._claimed.append(samples)

    def _begin_iterator(self, iterator: object) -> None:
        if self._is_exhausted and self._held:
            self._prefetched = 0  # no step followed the last fetch: nothing was prefetched
        self._iterator, self._first_step, self._held = iterator, None, []
        self._is_exhausted = False

    def exhaust(self, iterator: object) -> None:
        """Note that an iterator has no more batches."""
        if iterator == self._iterator:
            self._is_exhausted = True

    def end_step(self) -> int:
        """Return the number of samples of the step that ends now."""
        claimed, self._claimed = self._claimed, []
        if self._prefetched == 0:
            return sum(claimed)
        if not claimed:
            trained = self._held[: self._batches_per_step] if self._is_exhausted else []
            self._held = self._held[len(trained) :]
            return sum(trained)
        if self._first_step is None:
            self._first_step = claimed
        elif self._prefetched is None:
            self._prefetched = max(len(self._first_step) - len(claimed), 0)
            if self._prefetched:
                self._held = self._first_step[-self._prefetched :]
        batches = self._held + claimed
        # Each step trains at least one batch.
        count = max(len(batches) - (self._prefetched or 0), 1)
        self._held, self._batches_per_step = batches[count:], count
        return sum(batches[:count])


MAX_NESTED_LOADERS = 8  # loaders that are iterated inside each other's loops
MAX_HELD_FORWARDS = 64  # forwards without gradient of one iteration
# Integers are faster than enum members.
VALIDATION, FORWARD, GAP = int(State.VALIDATION), int(State.FORWARD), int(State.GAP)
LOSS, BACKWARD, OPTIMIZER = int(State.LOSS), int(State.BACKWARD), int(State.OPTIMIZER)
DISCARDED = -1  # in place of the number of an iterator that no longer exists


def _no_object() -> None:
    return None


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration of a loop over a loader: from one fetch to the next.

    Attributes:
        iterator: Number of the loader's iterator; 0 without a loader, from a forward to the
            optimizer's step.
        iterator_start: When the iterator was made; 0 if unknown.
        key: The iterator, also where its number is used again.
        model: Identity of the first model called, without a loader.
        has_eval_forward: Whether a model in eval mode was called.
        forwards: Forwards without gradient.
        is_training: Whether a backward, or a forward with gradient in training mode, belongs to it.
    """

    iterator: int
    start: int
    samples: int = 0
    iterator_start: int = 0
    fingerprint: int = 0
    model: int = 0
    has_eval_forward: bool = False
    is_training: bool = False
    forwards: list[tuple[int, int]] = field(default_factory=list)
    key: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.iterator, self.iterator_start)

    @property
    def may_be_evaluation(self) -> bool:
        return self.has_eval_forward or bool(self.forwards)


class TrainingLoop:
    """What one thread's training loop does.

    Args:
        recorder: Receives the events, and the samples of each step.
        count_samples: Returns the number of samples of a model's input.
        first_parameter: Returns the identity of a model's first parameter, 0 without one.
        fingerprint: Returns a checksum of a model's input; 0: none.
        on_training_batch: Called with the checksum of each batch that is trained, and whether it is
            of a model's input.

    Attributes:
        step_end: End of the last step until the next forward, else 0.
    """

    def __init__(
        self,
        recorder: Any,
        count_samples: Callable[[Any], int],
        first_parameter: Callable[[Any], int] = id,
        fingerprint: Callable[[Any], int] = lambda _: 0,
        on_training_batch: Callable[[int, bool], None] = lambda *_: None,
    ) -> None:
        self._recorder = recorder
        self._count_samples, self._first_parameter = count_samples, first_parameter
        self._fingerprint, self._on_training_batch = fingerprint, on_training_batch
        self.last_model: Callable[[], Any] = _no_object  # trained
        self._trained_parameters: set[int] = set()
        self._iterations: list[Iteration] = []
        # Ended ones without gradient and in training mode, each with its end; of one iterator.
        self._undecided: list[tuple[Iteration, int]] = []
        self._training_iterator: object = None  # key of the last one that trained
        self._evaluating_iterator: object = None  # key
        self._samples = SampleCounter()
        self._loaderless_evaluation = [0, 0]  # start and end
        self._forward_end = 0  # of a forward without its backward yet
        self._new_iterator = (0, 0)  # its number, and the start of its creation
        self.step_end = 0
        self._fetched_this_step = 0  # batches since the last step
        self._fetched_last_step = 0
        self._has_worked = False  # a training forward or a backward since the last counted step
        self._step_optimizer: Callable[[], Any] = _no_object
        self._other_optimizer: Callable[[], Any] = _no_object

    # Batches

    def iterator_made(self, iterator: int, start: int) -> None:
        """Note that a loader's iterator was made, or reset for another epoch."""
        self._new_iterator = (iterator, start)
        if self._iterations and self._iterations[-1].iterator == iterator:
            self._close_iterations(iterator, start)
        for iteration in self._iterations:
            if iteration.iterator == iterator:  # a deleted one, whose number is used again
                iteration.iterator = DISCARDED

    def fetch_begins(self, iterator: int, start: int) -> int:
        """Note that a batch is requested, which ends the iteration before.

        Returns the time at which the iterator was made, or 0 if it is not known.
        """
        if self._loaderless_evaluation[0]:
            self._end_loaderless_evaluation()
        self._forward_end = 0
        iterator_start = self._close_iterations(iterator, start)
        if self._undecided and self._undecided[-1][0].key != (iterator, iterator_start):
            self._decide_evaluation()
        return iterator_start

    def fetched(
        self, iterator: int, start: int, iterator_start: int, samples: int, fingerprint: int = 0
    ) -> None:
        """Note that a batch was fetched, which begins an iteration."""
        if self._new_iterator[0]:
            if self._new_iterator[0] == iterator:
                start = iterator_start = self._new_iterator[1]
            self._new_iterator = (0, 0)
        iteration = Iteration(iterator, start, samples, iterator_start, fingerprint)
        self._iterations.append(iteration)
        if len(self._iterations) > MAX_NESTED_LOADERS:
            del self._iterations[0]
        self._fetched_this_step += 1

    def exhausted(self, iterator: int, iterator_start: int) -> None:
        """Note that an iterator has no more batches."""
        key = (iterator, iterator_start)
        self._samples.exhaust(key)
        if self._undecided and self._undecided[-1][0].key == key:
            self._decide_evaluation()

    def _close_iterations(self, iterator: int, end: int) -> int:
        """Close the current iterations of a loader and of the loaders inside its loop.

        Returns the time at which the loader's iterator was made, or 0 if it is not known.
        """
        iterations = self._iterations
        if iterations and (
            iterations[-1].iterator == iterator
            or any(iteration.iterator == iterator for iteration in iterations)
        ):
            while iterations:
                iteration = iterations.pop()
                self._close(iteration, end)
                if iteration.iterator == iterator:
                    return iteration.iterator_start
        return 0

    def _close(self, iteration: Iteration, end: int) -> None:
        if iteration.may_be_evaluation and not iteration.is_training:
            if iteration.has_eval_forward or iteration.key == self._evaluating_iterator:
                self._recorder.event(VALIDATION, iteration.start, end)
                self._samples.discard_ahead()
                return
            if iteration.key != self._training_iterator:
                self._undecided.append((iteration, end))
                if len(self._undecided) > MAX_BATCHES_AHEAD:
                    self._decide_evaluation()
                return
            self._record_forwards(iteration)
        if iteration.samples:
            self._samples.add_ahead(iteration.samples)

    def _decide_evaluation(self) -> None:
        """Record the undecided iterations as an evaluation, and later ones of their iterator."""
        for iteration, end in self._undecided:
            self._recorder.event(VALIDATION, iteration.start, end)
            self._evaluating_iterator = iteration.key
        self._undecided.clear()
        self._samples.discard_ahead()

    def _decide_training(self) -> None:
        """Record the undecided iterations as training."""
        for iteration, _ in self._undecided:
            self._record_forwards(iteration)
            self._samples.add_ahead(iteration.samples)
        self._undecided.clear()

    def _record_forwards(self, iteration: Iteration) -> None:
        for start, end in iteration.forwards:
            self._recorder.event(FORWARD, start, end)
        iteration.forwards.clear()

    # The model

    def training_forward(
        self, model: Any, is_training_mode: bool, start: int, end: int, inputs: Any = ()
    ) -> None:
        """Note a forward with gradient. inputs: its arguments."""
        if self._loaderless_evaluation[0]:
            self._end_loaderless_evaluation()
        self._recorder.event(FORWARD, start, end)
        self._forward_end = end
        self._has_worked = True
        if self.last_model() is not model:  # usually the same one
            self.last_model = weakref.ref(model)
            if parameter := self._first_parameter(model):
                self._trained_parameters.add(parameter)
        uses_loader = self._fetched_this_step or self._fetched_last_step
        if not (uses_loader or self._samples.holds_batches):
            self._record_loaderless_input(model, start, inputs)
        elif not self._iterations:
            self._iterations.append(Iteration(0, start))
        self.step_end = 0
        if is_training_mode:
            self._iterations[-1].is_training = True
        else:
            self._iterations[-1].has_eval_forward = True

    def _record_loaderless_input(self, model: Any, start: int, inputs: Any) -> None:
        """Record the input of a step in whose two last steps no DataLoader was used.

        The gap since the last step is the wait for the batch, and the model's first input has its
        samples.
        """
        if self.step_end:
            self._recorder.event(GAP, self.step_end, start)
        if not self._iterations:
            self._iterations.append(Iteration(0, start))
            self._iterations[-1].model = id(model)
            self._iterations[-1].fingerprint = self._fingerprint(inputs)
        if self._iterations[-1].model == id(model) and inputs:
            self._iterations[-1].samples += self._count_samples(inputs)

    def other_forward(self, model: Any, is_training_mode: bool, start: int, end: int) -> None:
        """Note a forward without gradient."""
        iteration = self._iterations[-1] if self._iterations else None
        if iteration is not None and iteration.iterator and not iteration.is_training:
            iteration.has_eval_forward |= not is_training_mode
            if len(iteration.forwards) < MAX_HELD_FORWARDS:
                iteration.forwards.append((start, end))
            else:
                iteration.forwards[-1] = (iteration.forwards[-1][0], end)
        elif not is_training_mode and self._first_parameter(model) in self._trained_parameters:
            self._loaderless_evaluation = [self._loaderless_evaluation[0] or start, end]
        else:
            self._recorder.event(FORWARD, start, end)

    def _end_loaderless_evaluation(self) -> None:
        self._recorder.event(VALIDATION, *self._loaderless_evaluation)
        self._loaderless_evaluation = [0, 0]

    # Gradients

    def backward_begins(self, start: int) -> None:
        """Note that autograd's engine starts: the current iteration is one of training."""
        if self._loaderless_evaluation[0]:
            self._end_loaderless_evaluation()
        if self._forward_end:
            self._recorder.event(LOSS, self._forward_end, start)
            self._forward_end = 0
        self._has_worked = True
        if self._iterations:
            self._assign_to_training(self._iterations[-1])

    def backward_ends(self, start: int, end: int, accumulates: bool) -> None:
        """Note the end of a backward. accumulates: False for autograd.grad."""
        self._recorder.event(BACKWARD, start, end)
        if not accumulates:  # part of the loss, which may go on
            self._forward_end = end

    def _assign_to_training(self, iteration: Iteration) -> None:
        """Count an iteration as training: its forwards without gradient were part of the step."""
        iteration.is_training = True
        if len(self._iterations) > 1:
            self._close_earlier_evaluations(iteration)
        if iteration.iterator:
            self._training_iterator = iteration.key
        if self._undecided:
            if self._undecided[-1][0].key == iteration.key:
                self._decide_training()
            else:
                self._decide_evaluation()
        if iteration.forwards:
            self._record_forwards(iteration)
        if iteration.fingerprint:
            self._on_training_batch(iteration.fingerprint, not iteration.iterator)
            iteration.fingerprint = 0
        self._samples.claim(iteration.key if iteration.iterator else None, iteration.samples)
        iteration.samples = 0

    def _close_earlier_evaluations(self, iteration: Iteration) -> None:
        """Record evaluations that ended without a last fetch.

        An evaluation that knew its last batch was over when the loader that now trains was made.
        Its iterator is deleted, and another one may have the same number.
        """
        while len(self._iterations) > 1:
            last = self._iterations[-2]
            evaluates = last.iterator and last.may_be_evaluation and not last.is_training
            if not evaluates or last.start >= iteration.iterator_start:
                break
            self._recorder.event(VALIDATION, last.start, iteration.iterator_start)
            del self._iterations[-2]

    # The optimizer

    def step(self, optimizer: Any, start: int, end: int, was_skipped: bool = False) -> bool:
        """Note an optimizer's step; return whether a step of the job ends with it.

        was_skipped: The optimizer changed nothing, because a gradient was infinite.
        """
        if self._loaderless_evaluation[0]:
            self._end_loaderless_evaluation()
        self._forward_end = 0
        self._recorder.event(OPTIMIZER, start, end)
        if self._iterations and not self._iterations[-1].iterator:
            self._iterations.pop()  # a step ends an iteration without a loader
        if was_skipped or not self._ends_job_step(optimizer):
            return False
        self._has_worked = False
        self._recorder.samples += self._samples.end_step()
        self.step_end = end
        self._fetched_this_step, self._fetched_last_step = 0, self._fetched_this_step
        return True

    def _ends_job_step(self, optimizer: Any) -> bool:
        """Return whether a step of the job ends with this optimizer's step.

        Some frameworks use one optimizer for each group of parameters, with one backward before all
        of them: another optimizer than the counted one needs a forward or backward of its own. If
        several optimizers alternate, the steps of the first one count, until another one steps
        twice without it.
        """
        counted, other = self._step_optimizer(), self._other_optimizer()
        if counted is not None and counted is not optimizer:
            if not self._has_worked:
                return False
            if other is not optimizer:
                self._other_optimizer = weakref.ref(optimizer)
                return False
        self._step_optimizer, self._other_optimizer = weakref.ref(optimizer), _no_object
        return True

    def end(self, at: int) -> None:
        """Record the iterations that are still open; called at the end of the script."""
        if self._loaderless_evaluation[0]:
            self._end_loaderless_evaluation()
        self._decide_evaluation()
        if self._iterations:
            iteration = self._iterations[-1]
            if iteration.iterator and iteration.may_be_evaluation and not iteration.is_training:
                self._recorder.event(VALIDATION, iteration.start, at)
        self._iterations.clear()
