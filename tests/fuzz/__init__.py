"""Coverage-guided fuzzing of input that Paceline reads from others; see __main__.py."""
