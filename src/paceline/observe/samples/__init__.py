"""Batches of loaders, and their contents."""
