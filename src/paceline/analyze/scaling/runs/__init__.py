"""From the record of a run to its figures in a scaling study."""
