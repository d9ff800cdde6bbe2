"""``paceline verify``: run the script on N ranks and on one, and compare what they train."""
