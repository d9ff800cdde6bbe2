"""Terminal text and JSON of ``paceline verify``."""
