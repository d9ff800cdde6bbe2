"""What a rank sends, prints, saves and loads."""
