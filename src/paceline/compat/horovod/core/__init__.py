"""Horovod's collectives without a framework: ranks, process sets, coordination, exchange."""
