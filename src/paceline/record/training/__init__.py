"""Facts about a training for ``paceline verify``: samples, gradients, random numbers, states."""
