"""Tensors of which each rank holds a part: what `tensor/` and `spatial/` have in common."""
