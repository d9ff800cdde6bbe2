"""Horovod's interface on Paceline's exchange."""
