"""Train a script on one rank with several seeds, as the reference of ``paceline run``."""
