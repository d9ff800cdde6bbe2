"""Facts of backwards, optimizer steps and learning-rate schedules."""

from dataclasses import dataclass, field


@dataclass
class BackwardFacts:
    """A backward.

    Attributes:
        line: The line that called it.
        model: Key of the model whose forward came before.
        batches: Numbers of the batches (in ``RankFacts.batches``) that were fetched for it.
        root: Value of the tensor from which the backward started.
        loss: Value of the last loss function before it (without a reduction, the sum of its
            elements); None if none was seen.
        scale: Loss scale of a gradient scaler at this time; 1 without one.
        is_syncing: False within ``no_sync``.
        gradients: By parameter, the row of the gradient that this rank computed, before any
            exchange. Empty if it cannot be observed. Without those that were cleared before
            another backward of the same step.
        reduction: "mean", "sum" or "none" of that loss function; "" if it is not known.
        elements: Number of targets that it counted; 0 if it is not known.
        class_weight: Sum of the weights of their classes; 0 if classes have no weights.
        autocast: dtype of autocast in the forward; "" without autocast.
        is_returned: Whether ``torch.autograd.grad`` returned the gradients. They are not added to
            ``grad``, and DistributedDataParallel does not exchange them.
        raw: By parameter whose gradient a hook of the script has changed before any exchange, the
            row of the gradient before.
    """

    line: str
    model: int
    batches: list[int]
    root: float
    loss: float | None
    scale: float
    is_syncing: bool
    gradients: dict[str, int] = field(default_factory=dict)
    reduction: str = ""
    elements: int = 0
    class_weight: float = 0.0
    autocast: str = ""
    is_returned: bool = False
    raw: dict[str, int] = field(default_factory=dict)


@dataclass
class ClipFacts:
    """A call of ``clip_grad_norm_`` or ``clip_grad_value_``.

    Attributes:
        line: The line that called it.
        limit: Its limit.
        norm: The norm that it returned; None for ``clip_grad_value_``.
        gradients: By parameter, the row of the gradient before it was clipped.
        clipped: By parameter, the row of the gradient afterwards.
    """

    line: str
    limit: float
    norm: float | None
    gradients: dict[str, int]
    clipped: dict[str, int]


@dataclass
class StepFacts:
    """A step of an optimizer.

    Attributes:
        index: Number of steps of this optimizer before it.
        optimizer: Key of the optimizer.
        line: The line that called ``step``.
        learning_rates: Of each parameter group, in this step.
        backwards: The backwards since the last step.
        clips: The calls that clipped gradients since the last step.
        scale: Loss scale of the gradients before they were unscaled; 1 without a scaler.
        is_skipped: Whether a gradient scaler skipped the step.
        gradients: By parameter, the row of the gradient that the optimizer uses.
        parameters: By parameter, the row of its values after the step.
        buffers: By name, the row of the model's floating-point buffers at the step.
        before: By parameter, the row of its values before the step.
        momenta: Of each parameter group: ``momentum``, or the first of ``betas``; NaN without them.
        state: By "NUMBER KEY", the row of a tensor of the optimizer's state before the step, with
            the position of the parameter; only in the first step, and after a checkpoint was saved
            or loaded.
        gradient_lines: Lines of the script that changed gradients after a backward, in order; of
            the first steps only.
        value_lines: Lines between this step and the one before that changed parameters; of the
            first steps only.
    """

    index: int
    optimizer: int
    line: str
    learning_rates: list[float]
    backwards: list[BackwardFacts] = field(default_factory=list)
    clips: list[ClipFacts] = field(default_factory=list)
    scale: float = 1.0
    is_skipped: bool = False
    gradients: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    momenta: list[float] = field(default_factory=list)
    gradient_lines: list[str] = field(default_factory=list)
    value_lines: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """Key of the optimizer, and number of its steps before."""
        return self.optimizer, self.index


@dataclass
class OptimizerFacts:
    """An optimizer.

    Attributes:
        key: Number of the optimizer in this rank.
        class_name: Its class.
        line: Where it was made.
        parameters: Names of its parameters, by parameter group ("MODEL KEY/NAME";
            "?OPTIMIZER KEY.NUMBER" for one of no model).
        initial_rates: Learning rate of each group when it was made.
        rate_lines: Lines of the script that changed learning rates in the first steps.
    """

    key: int
    class_name: str
    line: str
    parameters: list[list[str]]
    initial_rates: list[float]
    rate_lines: list[str] = field(default_factory=list)


@dataclass
class ScheduleFacts:
    """A learning-rate scheduler.

    Attributes:
        class_name: Its class.
        line: Where it was made.
        optimizer: Key of its optimizer.
        lengths: Its attributes that count steps (T_max, total_steps, step_size, milestones, ...).
        step_lines: Lines that called ``step``.
        steps: Optimizer steps before each call of ``step``.
        peaks: Largest learning rate of each parameter group, if the schedule was made with it.
    """

    class_name: str
    line: str
    optimizer: int
    lengths: dict[str, list[int]]
    step_lines: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
