"""Atomic checkpoints: one shard per rank and a manifest with checksums."""
