"""Knobs of the loaders of batches."""
