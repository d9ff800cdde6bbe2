"""Continue after the loss of a node: with fewer nodes, and again with it when it returns."""
