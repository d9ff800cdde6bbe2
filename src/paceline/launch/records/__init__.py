"""Folders of running jobs in node-local memory, and the collection of their records."""
