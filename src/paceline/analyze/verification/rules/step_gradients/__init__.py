"""Rules on the gradient of a step: its exchange, weight and clipping."""
