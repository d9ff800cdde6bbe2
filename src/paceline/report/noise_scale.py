"""Sentences about the gradient noise scale."""

from ..analyze.figures.noise_scale import NoiseScale
from .numbers import amount, counted


def noise_scale_sentence(found: NoiseScale) -> str:
    """Return the noise scale with its interval, and what it says of a larger batch."""
    of = f"from {counted(found.steps, 'sampled step')}"
    if found.samples is None:
        return (
            f"gradient noise scale: undetermined {of}, because the gradient is not above its "
            "noise; larger batches probably still help"
        )
    high = "no upper limit" if found.high is None else amount(found.high)
    twice = found.steps_with(2 * found.global_batch)
    return (
        f"gradient noise scale {amount(found.samples)} samples (95 %: {amount(found.low)} to "
        f"{high}; {of}): twice the global batch of {amount(found.global_batch)} would need "
        f"{twice:.2f} of the steps to the same loss"
    )
