"""Timelines in Chrome's trace format, for Perfetto."""
