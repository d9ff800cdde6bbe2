"""Figures of a running job, from the newest events of its records."""
