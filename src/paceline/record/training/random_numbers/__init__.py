"""Random numbers: where they are drawn and seeded."""
