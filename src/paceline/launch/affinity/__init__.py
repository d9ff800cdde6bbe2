"""Bind the ranks of this node to cores, devices and memory, and report the bindings."""
