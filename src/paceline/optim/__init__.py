"""Optimizers and learning rates for large batches."""

from .large_batches import LAMB as LAMB
from .large_batches import LARS as LARS
