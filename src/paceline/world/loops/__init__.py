"""Loops over epochs and batches, and what is reported about them."""
