"""Memory of a training with Adam, by the formula of ZeRO (arXiv 1910.02054)."""

from paceline.cost.layout import Layout


def bytes_per_parameter(layout: Layout, ranks: int) -> float:
    """Return Adam's bytes a parameter on each rank, without activations and unsharded blocks."""
    whole, sharded = ((16, 0), (8, 8), (4, 12), (0, 16))[layout.zero]
    return whole + sharded / ranks
