"""Compute the figures of a report: efficiencies, losses, step times, process groups."""
