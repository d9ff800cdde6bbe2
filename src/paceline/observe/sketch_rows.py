"""The columns of a row of sketches, for readers that have no torch."""

SKETCH_SIZE = 32
# A row: the sketch, the sum of the squares, the number of elements that are not finite, and a
# checksum of the values' bytes (an integer below 2**53, so that float64 holds it exactly).
SQUARES, NONFINITE, CHECKSUM = SKETCH_SIZE, SKETCH_SIZE + 1, SKETCH_SIZE + 2
ROW_SIZE = SKETCH_SIZE + 3
