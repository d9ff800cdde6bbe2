"""What else is true of a script with one planted mistake: findings that are no false accusation."""

_GRADIENT = ("gradients-differ",)
_REPLICAS = ("replicas-diverge", "state-differs", "batch-norm-differs", *_GRADIENT)
_SAMPLES = ("samples-repeated", "samples-never-trained")
_RESUMED = ("resume-differs", "resume-repeats-samples", "checkpoint-incomplete")

# A finding of one of these ids is a consequence of the mistake, of every way to make it.
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    "replicas-start-different": (*_REPLICAS, "different-random-numbers"),
    "replicas-diverge": _REPLICAS,
    "gradients-summed": _GRADIENT,
    "gradients-divided-twice": _GRADIENT,
    "gradients-not-exchanged": _REPLICAS,
    "clipped-before-exchange": _GRADIENT,
    "accumulation-divided-wrongly": _GRADIENT,
    "uneven-batches-averaged": _GRADIENT,
    "loss-summed": _GRADIENT,
    "same-samples": _SAMPLES,
    "samples-repeated": _SAMPLES,
    "samples-never-trained": (),
    "epoch-not-set": (),
    "same-random-numbers": (),
    "different-random-numbers": (*_SAMPLES, "same-samples"),
    "learning-rate-not-scaled": (),
    "learning-rate-scaled-twice": (),
    "learning-rates-differ": _REPLICAS,
    "schedule-counts-other-steps": (),
    "batch-norm-differs": ("state-differs",),
    "batch-norm-of-one-rank": (),
    "metric-of-one-rank": ("metric-differs",),
    "metric-differs": (),
    "validation-repeats-samples": ("metric-differs",),
    "validation-misses-samples": ("metric-differs",),
    "state-differs": (*_REPLICAS, "metric-differs"),
    "checkpoint-incomplete": _RESUMED,
    "checkpoint-written-by-all": (),
    "resume-differs": ("checkpoint-incomplete", *_REPLICAS),
    "resume-repeats-samples": _RESUMED,
    "gradients-differ": (),
}
