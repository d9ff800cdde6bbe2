"""Learning rates for large batches."""
