"""Reach the other nodes: start an agent on each, connect it, and exchange messages."""
