"""Memory and files of a rank's shard: the copy of its tensors, and how they are written."""
