"""Memory of a training step: traced with fake tensors, and measured."""
