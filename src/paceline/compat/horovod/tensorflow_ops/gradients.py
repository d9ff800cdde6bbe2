"""Exchange of the gradients of a step that TensorFlow computes.

Inside ``tf.function`` the gradients are submitted in parts, each as soon as TensorFlow has computed
it: the exchange runs in the core's thread while TensorFlow computes the others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..core.process_sets import ProcessSet, global_process_set
from ..gradient_rules import GradientList, GradientRules, new_rules
from ..torch.basics import Adasum, Average, Sum
from ..torch.compression import Compression
from ..torch.gradient_exchange import BATCH_BYTES, STATE, ExchangeOptions
from .collectives import allreduce
from .host_calls import call_on_host, specs_of
from .library import tf

Part = list[int]  # numbers of gradients that are submitted together


def exchange_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    options: ExchangeOptions,
    groups: Sequence[Part] = (),
) -> list[Any]:
    """Return the gradients reduced over all ranks.

    Args:
        gradients: Tensors or ``tf.IndexedSlices``.
        names: A name for each, the same on all ranks.
        groups: Numbers of gradients that are reduced together.
    """
    results = list(gradients)
    dense = []
    for at, one in enumerate(gradients):
        if not isinstance(one, tf.IndexedSlices):
            dense.append(at)
        elif options.sparse_as_dense:
            results[at] = tf.convert_to_tensor(one)
            dense.append(at)
        else:
            members = options.process_set
            results[at] = allreduce(one, op=options.op, name=names[at], process_set=members)
    if dense:
        place = {at: number for number, at in enumerate(dense)}
        exchange = _Exchange(
            [results[at] for at in dense],
            [names[at] for at in dense],
            options,
            [[place[at] for at in group if at in place] for group in groups],
        )
        for at, result in zip(dense, exchange.results(), strict=True):
            results[at] = result
    return results


class _Exchange:
    """The dense gradients of one step, or of one graph that runs in every step."""

    def __init__(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        options: ExchangeOptions,
        groups: Sequence[Part],
    ) -> None:
        self._gradients, self._names, self._options = gradients, names, options
        self._groups = [group for group in groups if group]
        self._sent: list[tuple[Part, GradientList]] = []

    def results(self) -> list[Any]:
        parts = self._parts()
        if len(parts) == 1 or tf.executing_eagerly():
            return call_on_host(self._exchange(parts), self._gradients, specs_of(self._gradients))
        tokens = [self._submit_when_computed(part) for part in parts]
        return call_on_host(self._wait, tokens, specs_of(self._gradients))

    def _parts(self) -> list[Part]:
        """Return which gradients are submitted together. The last layer's are computed first."""
        if self._groups:
            return self._groups
        parts: list[Part] = [[]]
        nbytes = 0
        for at in reversed(range(len(self._gradients))):
            if nbytes >= BATCH_BYTES:
                parts.append([])
                nbytes = 0
            parts[-1].append(at)
            gradient = self._gradients[at]
            nbytes += (gradient.shape.num_elements() or 0) * gradient.dtype.size
        return parts

    def _exchange(self, parts: list[Part]) -> Callable[..., list[torch.Tensor]]:
        def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
            for part in parts:
                self._submit(part, [tensors[at] for at in part])
            return self._wait()

        return call

    def _submit_when_computed(self, part: Part) -> Any:
        """Add a call to the graph that submits gradients; return a tensor that it computes."""

        def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
            self._submit(part, tensors)
            return [torch.tensor(0, dtype=torch.int32)]

        inputs = [self._gradients[at] for at in part]
        spec = tf.TensorSpec([], tf.int32)
        return call_on_host(call, inputs, [spec], is_ordered=False)[0]

    def _submit(self, part: Part, tensors: Sequence[torch.Tensor]) -> None:
        sent = GradientList(self._options, in_place=False)
        names = [self._names[at] for at in part]
        if self._groups:
            sent.submit_group(f"group.{names[0]}", tensors)
        else:
            sent.submit(names, tensors)
        self._sent.append((part, sent))

    def _wait(self, *_: torch.Tensor) -> list[torch.Tensor]:
        sent, self._sent = self._sent, []
        results: dict[int, torch.Tensor] = {}
        for part, one in sent:
            results |= zip(part, one.wait(), strict=True)
        return [results[at] for at in range(len(self._gradients))]


class DistributedMethods:
    """The methods that a tape gets, in front of those of its own class."""

    def register_local_source(self, source: Any) -> None:
        """Exclude a source from the exchange: each rank keeps its own gradient."""
        _rules(self).add_local([source])

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the gradients of all ranks, with the structure of ``sources``."""
        own = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, *args, **kwargs
        )
        flat = tf.nest.flatten(own)
        exchanged = _rules(self).exchange(flat, tf.nest.flatten(sources), exchange_gradients)
        return tf.nest.pack_sequence_as(own, exchanged)


def _rules(tape: Any) -> GradientRules:
    rules: GradientRules = tape.__dict__[STATE]
    return rules


def DistributedGradientTape(  # noqa: N802  Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose ``gradient`` returns the gradients of all ranks.

    Args:
        gradtape: A ``tf.GradientTape``, which remains usable.
        device_dense, device_sparse: Not used.
        compression: How gradients are sent.
        sparse_as_dense: Exchange ``tf.IndexedSlices`` as dense tensors.
        op: How gradients are combined: Average, Sum or Adasum.
        gradient_predivide_factor: With Average: divide by this factor before the sum, and by the
            rest after it.
        num_groups: Former name of ``groups``.
        groups: Number of groups of gradients that are exchanged together, or lists of variables.
        process_set: Ranks whose gradients are combined; other ranks keep their own.
        scale_local_gradients: Divide gradients of local sources by the number of ranks.

    Raises:
        ValueError: An argument is invalid.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(
            f"DistributedGradientTape wraps a tf.GradientTape, not a {type(gradtape).__name__}. "
            "HINT: tape = hvd.DistributedGradientTape(tape)"
        )
    rules = new_rules(
        "tape", compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients, (Average, Sum, Adasum),
    )  # fmt: skip
    own = type(gradtape)
    if not issubclass(own, DistributedMethods):
        own = type(own.__name__, (DistributedMethods, own), {"__module__": own.__module__})
    made: Any = object.__new__(own)
    made.__dict__.update(gradtape.__dict__)
    made.__dict__[STATE] = rules
    return made


def PartialDistributedGradientTape(  # noqa: N802  Horovod's name
    gradtape: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return a distributed tape that keeps the gradients of some layers on each rank.

    Args:
        local_layers: A layer of Keras, or several. Other arguments are those of
            ``DistributedGradientTape``.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for layer in _layers(local_layers):
        _rules(tape).add_local(layer.trainable_weights)
    return tape


def _layers(layers: Any) -> Iterable[Any]:
    if layers is None:
        return ()
    return layers if isinstance(layers, list | tuple | set) else (layers,)
