"""The rules of ``paceline verify``, by subject."""
