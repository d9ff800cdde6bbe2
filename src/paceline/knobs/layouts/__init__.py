"""Knobs of the division of models over ranks."""
