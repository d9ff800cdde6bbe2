"""Layouts that shard parameters, gradients and optimizer states over ranks (ZeRO-1 to 3)."""
