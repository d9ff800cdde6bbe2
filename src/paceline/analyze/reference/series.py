"""The values of a metric over a training: of one run, and of the runs of a reference."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .metric import Metric

Floats = npt.NDArray[np.float64]

SAMPLES, STEPS = "samples", "steps"
MIN_VALUES = 40  # of a run, to measure its noise


@dataclass(frozen=True)
class Model:
    """The parameters of the optimizers, in their order.

    Attributes:
        shapes: Shapes of the first parameters.
        tensors: Number of parameters (tensors).
        elements: Number of their elements.
        sharded: Whether ranks hold parts of the parameters, so that shapes can't be compared.
    """

    shapes: list[list[int]] = field(default_factory=list)
    tensors: int = 0
    elements: int = 0
    sharded: bool = False

    def difference(self, other: "Model") -> str:
        """Return how the model of a run (``other``) differs from this one; "" if it does not."""
        if self.sharded or other.sharded or not self.tensors or not other.tensors:
            return ""
        if (self.tensors, self.elements, self.shapes) == (
            other.tensors,
            other.elements,
            other.shapes,
        ):
            return ""
        text = (
            f"the reference's has {self.elements:,} parameters in {self.tensors} tensors, this "
            f"one {other.elements:,} in {other.tensors}"
        )
        for number, (ours, theirs) in enumerate(zip(self.shapes, other.shapes, strict=False)):
            if ours != theirs:
                return f"{text}; tensor {number + 1} has the shape {ours} there, {theirs} here"
        return text


@dataclass(frozen=True)
class Series:
    """The values of one run, in the order of its steps.

    Attributes:
        steps: Optimizer steps, or numbers of the values if steps are not known.
        samples: Samples of all ranks until then; zeros if they are not known.
        values: The metric.
        rates: Learning rate; nan where it is not known.
        norms: L2 norm of the gradients of the optimizer; nan where it is not known.
        name: Where it was read, for messages.
        peak_rate: Largest learning rate of all steps, also of those without a value; nan where it
            is not known.
    """

    steps: Floats
    samples: Floats
    values: Floats
    rates: Floats
    norms: Floats
    name: str = ""
    peak_rate: float = np.nan

    def __len__(self) -> int:
        return len(self.values)

    @property
    def has_samples(self) -> bool:
        return bool(len(self.samples)) and bool(np.all(self.samples > 0))

    @property
    def samples_per_step(self) -> float:
        """Median number of samples of all ranks in a step; 0 if it is not known."""
        if not self.has_samples or len(self) < 2:
            return 0.0
        steps = np.maximum(np.diff(self.steps), 1)
        return float(np.median(np.diff(self.samples) / steps))

    def along(self, axis: str) -> Floats:
        return self.samples if axis == SAMPLES else self.steps


@dataclass(frozen=True)
class Reference:
    """Runs that are known to train well.

    Attributes:
        metric: What their values are.
        runs: One run for each seed.
        model: The parameters that they train.
        command: The script and its arguments.
        by_steps: Whether to compare at equal steps, because the samples of a job are not known.
    """

    metric: Metric
    runs: list[Series]
    model: Model = field(default_factory=Model)
    command: list[str] = field(default_factory=list)
    by_steps: bool = False

    @property
    def axis(self) -> str:
        """What runs are compared at: SAMPLES, or STEPS if samples are not known."""
        has_samples = not self.by_steps and all(run.has_samples for run in self.runs)
        return SAMPLES if has_samples else STEPS

    @property
    def distinct_runs(self) -> list[Series]:
        """The runs, without copies of the same values."""
        found: list[Series] = []
        for run in self.runs:
            if not any(np.array_equal(run.values, other.values) for other in found):
                found.append(run)
        return found
