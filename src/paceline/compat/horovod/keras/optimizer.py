"""``DistributedOptimizer``: an optimizer of Keras that updates with the gradients of all ranks."""

from collections.abc import Callable
from typing import Any

from ..core.process_sets import ProcessSet, global_process_set
from ..gradient_rules import GradientRules, new_rules
from ..torch.basics import Average
from ..torch.compression import Compression
from ..torch.gradient_exchange import STATE, check_passes, state_of
from .library import keras
from .operations import all_true, exchange_gradients


class _State:
    """What a distributed optimizer knows.

    Attributes:
        rules: How its gradients are exchanged.
        factor: Factor of the exchanged gradients.
        variables: Variables of the gradients that are being applied.
    """

    def __init__(self, rules: GradientRules, factor: float) -> None:
        self.rules, self.factor = rules, factor
        self.variables: list[Any] = []


class DistributedMethods:
    """The methods that an optimizer gets, in front of those of its own class.

    Gradients are exchanged before they are clipped, and only in the steps that update variables: an
    optimizer with ``gradient_accumulation_steps`` accumulates on each rank.
    """

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the exchange: each rank keeps its own gradient."""
        _state(self).rules.add_local([variable])

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        _state(self).variables = list(trainable_variables)
        return super()._backend_apply_gradients(  # type: ignore[misc]
            grads, trainable_variables
        )

    def _clip_gradients(self, grads: Any) -> Any:
        state = _state(self)
        # Without variables whose gradient is None, which may be others on other ranks.
        numbers = [self._get_variable_index(variable) for variable in state.variables]  # type: ignore[attr-defined]
        exchanged = state.rules.exchange(list(grads), state.variables, exchange_gradients, numbers)
        if state.factor != 1:
            exchanged = [None if one is None else one * state.factor for one in exchanged]
        return super()._clip_gradients(exchanged)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer, which from now on updates with the gradients of all ranks.

    It is the same object, of a class of the same name, so that saved models can be loaded without
    Paceline.

    Args:
        optimizer: An optimizer of Keras; ``keras.optimizers.LossScaleOptimizer`` as well.
        name: Prefix of the names of exchanged gradients, the same on all ranks.
        device_dense, device_sparse: Not used.
        compression: How gradients are sent.
        sparse_as_dense: Exchange sparse gradients as dense ones.
        gradient_predivide_factor: With Average: divide by this factor before the sum, and by the
            rest after it.
        op: How gradients are combined: Average or Sum.
        backward_passes_per_step: Steps whose gradients are accumulated on each rank before they are
            exchanged and applied.
        average_aggregated_gradients: Divide accumulated gradients by their number.
        num_groups: Former name of ``groups``.
        groups: Number of groups of gradients that are exchanged together, or lists of variables.
        process_set: Ranks whose gradients are combined; other ranks step on their own.
        scale_local_gradients: Divide gradients of local variables by the number of ranks.

    Raises:
        ValueError: An argument is invalid.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"DistributedOptimizer wraps an optimizer of Keras, not a {type(optimizer).__name__}. "
            "HINT: hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))"
        )
    rules = new_rules(
        name or "", compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    scaler = keras.optimizers.LossScaleOptimizer
    _agree_about_finite_gradients(scaler)
    inner = optimizer.inner_optimizer if isinstance(optimizer, scaler) else optimizer
    _check_class(inner)
    factor = _accumulate(inner, backward_passes_per_step, average_aggregated_gradients)
    own = type(inner)
    if not issubclass(own, DistributedMethods):
        described = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        inner.__class__ = type(own.__name__, (DistributedMethods, own), described)
    inner.__dict__[STATE] = _State(rules, factor)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return a distributed optimizer that keeps the gradients of some layers on each rank.

    Args:
        local_layers: A layer with its weights, or several. Other arguments are those of
            ``DistributedOptimizer``.
    """
    result = DistributedOptimizer(optimizer, *args, **options)
    layers = local_layers if isinstance(local_layers, list | tuple | set) else [local_layers]
    for layer in layers:
        if layer is None:
            continue
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"local_layers contains a {type(layer).__name__}. HINT: local_layers=[layer] with "
                "layers of Keras"
            )
        for variable in layer.trainable_weights:
            getattr(result, "inner_optimizer", result).register_local_var(variable)
    return result


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a saved model; its optimizer becomes a ``DistributedOptimizer`` with its state.

    Args:
        custom_optimizers: Classes of optimizers that are not those of Keras.
        custom_objects: Other classes and functions of the model, by name.
        legacy_opts: Not used: of Keras 2.
        options: Further arguments of ``keras.saving.load_model``.
    """
    known = {one.__name__: one for one in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known, **options)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer exchanges its gradients."""
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), DistributedMethods)


def retrace_without_exchange(model: Any) -> None:
    """Let TensorFlow trace a model's step again if it has not seen that gradients are exchanged.

    A step that was compiled before ``DistributedOptimizer`` would go on without the exchange.
    """
    optimizer = getattr(model, "optimizer", None)
    if is_distributed(optimizer):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not _state(inner).variables:
            model.train_function = None
            model.make_train_function()


def _state(optimizer: Any) -> _State:
    return state_of(optimizer, _State)


def _check_class(optimizer: Any) -> None:
    """Check that the exchange finds its place in the optimizer's step."""
    for method in ("_backend_apply_gradients", "_clip_gradients", "_get_variable_index"):
        if not callable(getattr(optimizer, method, None)):
            raise ValueError(
                f"DistributedOptimizer: {type(optimizer).__name__} has no method {method}, which "
                f"the exchange of gradients uses (Keras {keras.__version__}). HINT: use another "
                "version of Keras 3"
            )


def _accumulate(optimizer: Any, passes: Any, averages: bool) -> float:
    """Let the optimizer accumulate gradients; return the factor for the mean of them."""
    check_passes(passes)
    if passes == 1:
        return 1.0
    if optimizer.built:
        raise ValueError(
            "backward_passes_per_step can't be set for an optimizer that has made steps. HINT: "
            "hvd.DistributedOptimizer before model.fit"
        )
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps} differ. HINT: give one of them"
        )
    optimizer.gradient_accumulation_steps = passes
    return 1.0 if averages else float(passes)


_patched: set[type] = set()


def _agree_about_finite_gradients(scaler: Any) -> None:
    """Let a loss scale skip a step on all ranks if the gradients of one of them are not finite.

    Otherwise that rank would not take part in the exchange.
    """
    if scaler in _patched:
        return
    _patched.add(scaler)
    check: Callable[[Any, Any], Any] = scaler.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite, inner = check(self, grads), self.inner_optimizer
        if not isinstance(inner, DistributedMethods):
            return finite
        rules = _state(inner).rules
        if not rules.are_exchanged:
            return finite
        return all_true(finite, rules.options.process_set)

    scaler.check_finite = check_finite
