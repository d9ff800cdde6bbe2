"""Hooks in torch that record a training loop and its collectives."""
