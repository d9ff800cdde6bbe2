"""Knob that runs 2D convolutions in the channels-last memory format.

Weights are converted before DDP wraps the model; without DDP, after the first optimizer step.
Inputs of shape (N, C, H, W) are converted in each call.
"""

from typing import Any

from ..record.hooks import taps
from ..record.hooks.phases import UncopiedHook
from .apply import KnobResult

KINDS = ("Conv2d", "ConvTranspose2d")


def channels_last(_: bool, turned: KnobResult) -> None:
    def images(layer: Any, inputs: Any) -> Any:
        import torch

        first = inputs[0] if inputs else None
        if isinstance(first, torch.Tensor) and first.dim() == 4:
            return (first.contiguous(memory_format=torch.channels_last), *inputs[1:])
        return inputs

    def laid_out(layer: Any) -> None:
        import torch

        if type(layer).__name__ not in KINDS or "_paceline_layout" in layer.__dict__:
            return
        layer.__dict__["_paceline_layout"] = True
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
        layer.register_forward_pre_hook(UncopiedHook(images), prepend=True)
        turned.done()

    def wraps(_: Any, module: Any, *__: Any, **___: Any) -> None:
        for layer in module.modules():
            laid_out(layer)

    def after_first_step(module: Any) -> None:
        """Convert the layers of a script without DDP after its first step, when all were called."""
        called: list[Any] = []

        def look(layer: Any, _: Any) -> None:
            if type(layer).__name__ in KINDS:
                called.append(layer)

        looking = module.register_module_forward_pre_hook(look)

        def stepped(*_: Any) -> None:
            looking.remove()  # does nothing after the first time
            for layer in called:
                laid_out(layer)
            called.clear()

        taps.on_step(after=stepped)

    taps.REPLICA.before(wraps)
    taps.on_import("torch.nn.modules.module", after_first_step)
