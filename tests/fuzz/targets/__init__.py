"""Fuzzing targets, one per module."""
