"""Command lines of horovodrun and ddlrun, translated into those of ``paceline run``."""
