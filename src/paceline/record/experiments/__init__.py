"""Experiments of ``paceline diagnose`` inside a rank: parts of the training switched off."""
