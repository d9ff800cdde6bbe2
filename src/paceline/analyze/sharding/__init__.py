"""Sharded models (FSDP2): gathers and reductions of each block, and the memory that is left."""
