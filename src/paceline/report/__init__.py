"""What people look at. No torch."""
