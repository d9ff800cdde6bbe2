"""Formats of other programs, read and written without executing code."""
