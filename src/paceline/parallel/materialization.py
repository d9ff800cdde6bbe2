"""Computing the tensors of a deferred model, one storage at a time.

The operators of the construction are executed with the original state of the random number
generator, and random ones in their original order. Only what later operators need is held. An
initialization that another
one overwrites (layers' defaults before a model's ``apply(init_weights)``) is drawn into scratch
memory, one tensor at a time, because the generator of the CPU can only be advanced by drawing.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from .deferred import (
    Recording,
    View,
    draw,
    execute,
    named_tensors,
    needed,
    recording_of,
    schedule,
    tensor_of,
    touched,
    view_of,
)

Keep = Callable[[str, torch.Tensor], None]


class DeferredTensor(NamedTuple):
    """A parameter or buffer of a deferred model.

    Attributes:
        name: Its name in the model.
        tensor: The tensor without values.
        view: Its part of the storage.
    """

    name: str
    tensor: torch.Tensor
    view: View


class DeferredStorage(NamedTuple):
    """Memory that is computed as a whole, and the tensors of the model in it."""

    nbytes: int
    tensors: tuple[DeferredTensor, ...]

    def values(
        self, storage: torch.UntypedStorage
    ) -> Iterator[tuple[DeferredTensor, torch.Tensor]]:
        """Yield each tensor with its values, which share the memory of the computed storage."""
        for tensor in self.tensors:
            yield tensor, view_of(tensor.view, storage)


Finish = Callable[[int, torch.UntypedStorage], None]


class Materialization:
    """The plan that computes the tensors of a deferred model. Make it before the model is sharded.

    Attributes:
        peak_bytes: Largest sum of the bytes of storages that ``run`` held at once.
        storages: What it computes, in the order of the model's tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the deferred tensors of a model.

        Raises:
            ValueError: A tensor on the device meta is not deferred, so that it has no values.
        """
        self.peak_bytes = 0
        self._recordings: dict[int, Recording] = {}
        found: dict[tuple[int, int], list[DeferredTensor]] = {}
        for name, tensor in named_tensors(model):
            recording = recording_of(tensor)
            view = recording.view(tensor) if recording else None
            if recording is not None and view is not None:
                self._recordings[id(recording)] = recording
                entry = DeferredTensor(name, tensor, view)
                found.setdefault((id(recording), view.storage), []).append(entry)
            elif tensor.is_meta:
                raise ValueError(
                    f"world.distribute: {name} of the {type(model).__name__} is on the device meta "
                    "and has no values. HINT: build the whole model in the block with "
                    "world.deferred():, and convert its dtype there"
                )
        self.storages = [
            DeferredStorage(max(tensor.view.nbytes for tensor in of), tuple(of))
            for of in found.values()
        ]
        self._numbers = {key: number for number, key in enumerate(found)}

    def run(self, keep: Keep | None = None) -> None:
        """Compute each tensor completely, give it to ``keep`` and drop it.

        Args:
            keep: Takes the tensor's name in the model and its values, and copies its part. None:
                the model's tensors get the values, and remain the same objects.
        """

        def finish(number: int, storage: torch.UntypedStorage) -> None:
            for tensor, values in self.storages[number].values(storage):
                if keep is not None:
                    keep(tensor.name, values)
                else:
                    give_values(tensor.tensor, values)

        self.compute(finish)

    def compute(self, finish: Finish) -> None:
        """Compute each storage, give its number in ``storages`` and its memory to ``finish``."""
        state = torch.get_rng_state()
        try:
            for key, recording in self._recordings.items():
                numbers = {s: number for (of, s), number in self._numbers.items() if of == key}
                torch.set_rng_state(recording.random_state)
                with torch.no_grad():
                    self._replay(recording, numbers, finish)
        finally:
            torch.set_rng_state(state)

    def _replay(self, recording: Recording, numbers: dict[int, int], finish: Finish) -> None:
        executed = needed(recording.operators, set(numbers))
        order = schedule(recording.operators, executed)
        last = {s: i for i in order if i in executed for s in touched(recording.operators[i])}
        real: dict[int, torch.UntypedStorage] = {}
        for storage in numbers.keys() - last.keys():  # torch.empty that nothing fills
            self._finish(storage, numbers[storage], real, finish)
        for i in order:
            operator = recording.operators[i]
            if i not in executed:
                draw(operator)
                continue
            execute(operator, real)
            held = sum(storage.nbytes() for storage in real.values())
            self.peak_bytes = max(self.peak_bytes, held)
            for storage in [s for s in touched(operator) if last[s] == i]:
                if storage in numbers:
                    self._finish(storage, numbers[storage], real, finish)
                real.pop(storage, None)

    def _finish(
        self, storage: int, number: int, real: dict[int, torch.UntypedStorage], finish: Finish
    ) -> None:
        for tensor in self.storages[number].tensors:
            tensor_of(tensor.view, real)  # makes its memory, if no operator did
        finish(number, real[storage])


def give_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a model's tensor its values; it remains the same object."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    # torch.utils.swap_tensors refuses tensors with weak references, which nn.LSTM has; they refer
    # to the object, which remains.
    torch._C._swap_tensor_impl(tensor, values)
