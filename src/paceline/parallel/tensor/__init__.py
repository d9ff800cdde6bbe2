"""Tensor parallelism of plain modules: parameters in parts, and operations that follow them."""
