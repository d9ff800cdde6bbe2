"""Predict the gain of a change before it is tried. Needs no torch."""
