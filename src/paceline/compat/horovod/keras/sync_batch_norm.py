"""Batch normalization over the samples of all ranks, under Horovod's name."""

from typing import Any

from ..torch.basics import rank, size
from .library import keras
from .operations import sum_tensors


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization whose mean and variance are those of the samples of all ranks.

    Arguments as for ``keras.layers.BatchNormalization``, except ``fused``, which is not used.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused:
            raise ValueError(
                "SyncBatchNormalization does not support fused=True. HINT: leave it out"
            )
        kwargs.pop("synchronized", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if size() == 1 or _is_symbolic(inputs):
            return super()._moments(inputs, mask)
        if mask is not None:
            raise ValueError(
                "SyncBatchNormalization does not support masks. HINT: keras.layers."
                "BatchNormalization, or a layer without a mask before it"
            )
        ops = keras.ops
        mean, variance = super()._moments(inputs, mask)
        shape = ops.shape(inputs)
        count = 1.0
        for axis in self._reduction_axes:
            count = ops.cast(shape[axis], mean.dtype) * count
        own = ops.concatenate([ops.reshape(count, (1,)), mean, variance])
        # A sum, in which each rank has a row of its own: its gradient is the sum over all ranks.
        place = ops.cast(ops.arange(size()) == rank(), mean.dtype)
        name = f"sync_batch_norm.{mean.shape[0]}"
        rows = sum_tensors(ops.reshape(place, (-1, 1)) * ops.reshape(own, (1, -1)), name)
        counts, means, variances = (
            rows[:, :1],
            rows[:, 1 : 1 + mean.shape[0]],
            rows[:, 1 + mean.shape[0] :],
        )
        shares = counts / ops.sum(counts)
        total_mean = ops.sum(shares * means, axis=0)
        spread = ops.square(means - total_mean)
        return total_mean, ops.sum(shares * (variances + spread), axis=0)


def _is_symbolic(inputs: Any) -> bool:
    """Return whether Keras only computes shapes."""
    device = getattr(inputs, "device", None)
    return getattr(device, "type", None) == "meta" or keras.backend.is_keras_tensor(inputs)
