"""What people and other programs see of a scaling study: rows, sentences and files."""
