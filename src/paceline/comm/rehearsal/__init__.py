"""Process groups of a rank that runs alone, without network: ``paceline run --rehearse``."""
