"""Cores, memory, devices and allocations, read from files and environment variables.

This package starts no process.
"""
