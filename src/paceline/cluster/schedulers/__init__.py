"""Read allocations of Slurm, LSF, PBS, Cobalt and Flux, host lists and hostfiles."""
