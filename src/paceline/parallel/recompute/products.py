"""The operators whose outputs selective recomputation keeps: they cost much for their bytes."""

from typing import Any

from torch import nn

PRODUCTS = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
}


def is_product(operator: Any, args: Any, options: Any) -> bool:
    """Return whether selective recomputation keeps the output of an operator."""
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.name not in PRODUCTS:
        return False
    # An attention with dropout draws random numbers: without it, later ones would differ.
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return not ({**named, **options}.get("dropout_p") or 0.0)


def works_in_place(module: nn.Module) -> bool:
    """Return whether a module may change a kept product (``nn.ReLU(inplace=True)``)."""
    return any(getattr(part, "inplace", False) for part in module.modules())
