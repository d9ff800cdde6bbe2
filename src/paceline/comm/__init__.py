"""How ranks exchange."""
