"""Sentences about the gradient noise scale."""

from ..analyze.figures.noise_scale import NoiseScale
from .numbers import amount, counted


def noise_scale_text(found: NoiseScale) -> str:
    """Return the noise scale with its interval."""
    of = f"from {counted(found.steps, 'sampled step')}"
    if found.samples is None:
        return (
            f"gradient noise scale: undetermined {of}, because the gradient is not above its noise"
        )
    high = "no upper limit" if found.high is None else amount(found.high)
    return (
        f"gradient noise scale {amount(found.samples)} samples (95 %: {amount(found.low)} to "
        f"{high}; {of})"
    )


def noise_scale_sentence(found: NoiseScale) -> str:
    """Return the noise scale with its interval, and what it says of a larger batch."""
    text = noise_scale_text(found)
    if found.samples is None:
        return f"{text}; larger batches probably still help"
    twice = found.steps_with(2 * found.global_batch)
    return (
        f"{text}: twice the global batch of {amount(found.global_batch)} would need {twice:.2f} of "
        "the steps to the same loss"
    )
