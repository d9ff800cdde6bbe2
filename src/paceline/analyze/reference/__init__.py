"""Hold the loss of a running job against the losses of reference runs."""
