"""The machine file: measurements of a machine, with units."""
