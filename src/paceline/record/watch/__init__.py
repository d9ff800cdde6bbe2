"""Values of each optimizer step for the launcher: loss, learning rate, gradient norm."""
