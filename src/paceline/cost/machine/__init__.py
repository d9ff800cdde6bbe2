"""The machine file: what was measured of a machine, with units."""
