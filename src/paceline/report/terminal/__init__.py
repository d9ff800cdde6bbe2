"""Reports as tables and text in the terminal."""
