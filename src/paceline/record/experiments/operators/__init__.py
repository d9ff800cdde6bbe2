"""Profile of the operators of a few steps: what a model computes, by line of the script."""
