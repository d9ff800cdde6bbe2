"""A study of ``paceline tune``: rows and sentences for tables, CSV and JSON."""
