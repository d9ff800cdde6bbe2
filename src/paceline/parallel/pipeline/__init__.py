"""Pipelines: the stages of a model on different ranks, which work on micro-batches of a batch."""
