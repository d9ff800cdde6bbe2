"""Comparison of a divided model with the whole one."""
