"""Readers of Slurm, LSF, PBS, Cobalt and Flux allocations, of host lists and of hostfiles."""
