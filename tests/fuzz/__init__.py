"""Coverage-guided fuzzing of what Paceline reads from others; see __main__.py."""
