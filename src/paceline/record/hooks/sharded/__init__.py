"""Sharded models (FSDP2): the block of a collective, and gradients before their reduction."""
