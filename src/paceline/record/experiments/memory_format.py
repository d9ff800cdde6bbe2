"""Switch convolutions from the contiguous memory format to channels-last, and back."""

from collections.abc import Sequence
from typing import Any

from .cached_batches import CachedBatches


class ContiguousFormat:
    """The contiguous memory format of convolution weights and of cached images.

    Args:
        convolutions: Weak references to the layers.
        batches: The cached batches, whose images get the same format.
    """

    def __init__(self, convolutions: Sequence[Any], batches: CachedBatches) -> None:
        self._convolutions, self._batches = convolutions, batches

    def off(self) -> None:
        import torch

        self._set(torch.channels_last)

    def on(self) -> None:
        import torch

        self._set(torch.contiguous_format)

    def after_step(self) -> None:
        """Do nothing: a step needs no work."""

    def results(self) -> dict[str, Any]:
        return {}

    def _set(self, memory_format: Any) -> None:
        for ref in self._convolutions:
            if (layer := ref()) is not None:
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)

        def convert(leaf: Any) -> Any:
            fits = hasattr(leaf, "dim") and leaf.dim() == 4
            return leaf.contiguous(memory_format=memory_format) if fits else leaf

        self._batches.convert = convert
