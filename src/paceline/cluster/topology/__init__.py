"""Read what this host consists of: sockets, NUMA nodes, cores, devices, interfaces."""
