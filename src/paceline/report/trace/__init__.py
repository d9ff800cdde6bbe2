"""Timelines of a run in the Chrome trace format, for Perfetto."""
