"""Sharded models (FSDP2): which block a collective belongs to."""
