"""The ring buffer of events that each rank writes, and its recorder. No torch."""
