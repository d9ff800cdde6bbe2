"""Facts of models: parameters, wrappers, states."""

from dataclasses import dataclass, field

AVERAGE = "average"  # kind of the state of an averaged copy of the model
FLAT = "FullyShardedDataParallel"  # shards flat parameters, whose gradients are not observed


@dataclass
class ParameterFacts:
    """A parameter of a model.

    Attributes:
        name: Name in the user's model, without the prefix of a wrapper.
        shape: Shape of the whole parameter.
        dtype: Such as "float32".
        requires_grad: At the time when the model was wrapped; without a wrapper, at the first
            forward.
        shard_numel: Number of elements that this rank holds.
    """

    name: str
    shape: list[int]
    dtype: str
    requires_grad: bool
    shard_numel: int


@dataclass
class ModelFacts:
    """A trained model: the outermost module of a forward that has parameters.

    Attributes:
        key: Number of the model in this rank.
        class_name: Class of the user's module.
        wrapper: "DistributedDataParallel", "FSDP2" or "FullyShardedDataParallel"; "" if none.
        line: Where it was wrapped; without a wrapper, the line of its first forward.
        is_sharded: Whether each rank holds a part of the parameters.
        broadcasts_buffers: Whether DistributedDataParallel sends rank 0's buffers to all ranks.
        parameters: All parameters.
        outside_forwards: Lines that called a module of the wrapped model, and not the wrapper.
        no_sync_lines: Lines that entered ``no_sync``, or switched the synchronization off.
        initial: By parameter, the row of its values before the wrapper's broadcast.
        first: By parameter, the row of its values at the first training forward.
        batch_norms: Names of batch normalization layers that compute statistics of one rank only.
        ignored: Parameters that DistributedDataParallel was told to ignore.
        hook_lines: Lines that registered hooks on gradients.
        exchange_hook_lines: Lines that registered a communication hook, or changed the factor with
            which FSDP2 reduces.
    """

    key: int
    class_name: str
    wrapper: str
    line: str
    is_sharded: bool
    broadcasts_buffers: bool
    parameters: list[ParameterFacts]
    outside_forwards: list[str] = field(default_factory=list)
    no_sync_lines: list[str] = field(default_factory=list)
    initial: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    batch_norms: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    hook_lines: list[str] = field(default_factory=list)
    exchange_hook_lines: list[str] = field(default_factory=list)


@dataclass
class StateFacts:
    """A state besides model and optimizer that ranks have to agree on.

    Attributes:
        kind: "scaler", "schedule", "average" (a copy of the model whose values are averaged),
            "tensor" (of the script's objects), "buffer" (of its modules without parameters) or
            "statistics" (running statistics of a model that is evaluated and not trained).
        name: Its class, and a name if it has one.
        line: Where it was made.
        step: Optimizer steps before this value.
        values: Numbers of the state, such as the loss scale.
        rows: By parameter, the row of its values; empty for states without tensors.
        changed_by: Lines that change it: the one of the training loop, and the innermost one.
    """

    kind: str
    name: str
    line: str
    step: int
    values: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    changed_by: list[str] = field(default_factory=list)
