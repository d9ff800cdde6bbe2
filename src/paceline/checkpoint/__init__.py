"""Checkpoints that cannot be lost: shards and a manifest, whole or not there at all."""
