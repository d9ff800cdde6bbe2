"""Optimizers and learning rates for large batches."""

from .layerwise import LAMB as LAMB
from .layerwise import LARS as LARS
