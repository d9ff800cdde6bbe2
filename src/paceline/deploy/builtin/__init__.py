"""The builtin backend's side of the export: from PyTorch's graph to a list of operations."""
