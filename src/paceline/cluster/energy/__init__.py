"""Energy counters of a node, as far as the machine has them and the user may read them."""
