"""Targets that read checkpoints."""
