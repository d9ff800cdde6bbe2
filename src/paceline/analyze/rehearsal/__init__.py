"""What the rehearsed ranks of a job have called: ``paceline run --rehearse``."""
