"""Copy a packed dataset to node-local storage; nodes of a job fetch shards from each other."""
