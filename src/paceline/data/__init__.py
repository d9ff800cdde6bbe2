"""Input: which rank reads which sample, in an order that does not depend on their number."""
