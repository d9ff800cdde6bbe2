"""Interfaces of other libraries, on Paceline's exchange."""
