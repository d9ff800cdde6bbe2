"""Samples divided along depth, height and width: each rank computes its part of every layer."""
