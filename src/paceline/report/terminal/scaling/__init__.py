"""Scaling studies in the terminal: tables, progress, comparison."""
