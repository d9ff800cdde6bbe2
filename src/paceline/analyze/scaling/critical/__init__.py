"""The critical batch: the largest one that does not need more samples, measured by short runs."""
