"""What the gradient noise scale says of a study's batches, in words."""

from ...analyze.scaling.outcomes.batch_advice import Band, BatchAdvice
from ..numbers import amount, counted


def batch_sentences(found: BatchAdvice | None) -> list[str]:
    """Return the noise scale, and steps and samples to the same loss for each larger batch."""
    if found is None:
        return []
    runs = counted(found.runs, "run")
    if found.samples is None or found.low is None or found.high is None:
        return [
            f"Gradient noise scale: undetermined in most of {runs}, because the gradient is not "
            "above its noise. Nothing is said of steps to a loss with the larger batches. HINT: "
            "paceline scale --critical-batch measures them"
        ]
    return [
        f"Gradient noise scale: {amount(found.samples)} samples (95 %: {amount(found.low)} to "
        f"{amount(found.high)}; median of {runs}). Relative to a batch of {amount(found.base)}, "
        "to the same loss:",
        *(
            f"  {counted(one.ranks, 'rank')}{'' if one.is_measured else ' (predicted)'}, batch "
            f"{amount(one.batch)}: {_band(one.steps)} of the steps, {_band(one.samples)} times the "
            "samples"
            for one in found.larger
        ),
    ]


def _band(found: Band) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} to {high:.2f})"
