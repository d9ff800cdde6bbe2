"""Choose the samples of each global batch and the part of each rank."""
