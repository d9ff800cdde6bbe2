"""The shard format: the index and metadata of a packed dataset, and decoding of samples."""
