"""Compression of gradients for the exchange: none, or as float16."""

from typing import Any

import torch


class Compressor:
    """How a tensor is sent. A script may pass a class of its own as ``compression=``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point tensors as float16. Values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        half = tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor
        return half, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) else tensor


class Compression:
    """The compressors by name, as Horovod names them."""

    none = NoneCompressor
    fp16 = FP16Compressor
