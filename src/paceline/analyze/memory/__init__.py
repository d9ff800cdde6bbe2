"""Memory of the ranks over time."""
