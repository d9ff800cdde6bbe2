"""What is installed in a rank, and facts about its training for ``paceline verify``."""
