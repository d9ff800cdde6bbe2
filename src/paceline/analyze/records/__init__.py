"""Read the records of a run and bring them onto one clock and one timeline."""
