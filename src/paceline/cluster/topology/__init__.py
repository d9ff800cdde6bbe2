"""Readers of this host's hardware: sockets, NUMA nodes, cores, devices, network interfaces."""
