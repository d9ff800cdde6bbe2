"""``paceline diagnose``: run the ladder of experiments and try remedies."""
