"""Plan which cores, devices and memory each rank of a host gets."""
