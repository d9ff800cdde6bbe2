"""What work costs on a machine: what was measured of it, what its makers say, and its limits."""
