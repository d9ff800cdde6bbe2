"""Compute the figures of a running job from the ends of its records."""
