"""Parallel layouts of a model over ranks: data parallelism."""
