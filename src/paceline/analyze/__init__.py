"""From records to figures. Pure functions of the record; no torch."""
