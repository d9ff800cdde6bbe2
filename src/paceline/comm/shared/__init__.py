"""Collectives over memory that the ranks of one host share."""
