"""Short runs from one checkpoint with larger batches (``paceline scale --critical-batch``)."""
