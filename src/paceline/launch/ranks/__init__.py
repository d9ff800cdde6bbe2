"""Start the ranks of one node: the fork server, PyTorch's elastic agent, the rank process."""
