"""``DistributedGradientTape``: a tape whose gradients are those of all ranks."""

from collections.abc import Iterable
from typing import Any

from ..core.process_sets import ProcessSet, global_process_set
from ..gradient_rules import GradientRules, new_rules
from ..torch.basics import Adasum, Average, Sum
from ..torch.compression import Compression
from .gradients import exchange_gradients
from .library import tf

_STATE = "_horovod"  # attribute of the tape: how its gradients are exchanged


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
    rules: GradientRules = tape.__dict__[_STATE]
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
    made.__dict__[_STATE] = rules
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
