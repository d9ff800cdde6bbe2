"""The context of a validation pass: no gradients, and models in eval mode."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ...data.sampling.sample_order import BatchShare
from ...parallel.strategy.distributed_model import DistributedModel


class EvaluationPass(ExitStack):
    """The context of one validation pass, from its first batch until it ends.

    Attributes:
        name: The loader and the script's line, for messages.
        share: This rank's part of the current batch.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.share: BatchShare | None = None


@contextmanager
def evaluation(models: list[DistributedModel]) -> Iterator[None]:
    """Context without gradients, with modules in eval mode.

    Rank 0's buffers are broadcast at the start, so that ranks may run different numbers of
    forwards.
    """
    modules = [module for model in models for module in model.called.modules()]
    modes = [module.training for module in modules]
    gradients = torch.is_grad_enabled()
    for model in models:
        model.set_buffer_sync(False)
        model.called.eval()
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for model in models:
            model.set_buffer_sync(True)
