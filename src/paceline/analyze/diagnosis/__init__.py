"""Find the causes of lost time from the ladder of experiments and the record."""
