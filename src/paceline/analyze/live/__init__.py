"""Figures of a running job, computed from the tails of its records."""
