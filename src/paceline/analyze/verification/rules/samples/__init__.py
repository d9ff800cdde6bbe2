"""Which samples are trained and evaluated, by whom, and how often."""
