"""A study of ``paceline tune`` on the terminal."""
