"""Hold the losses of a running job against a reference (``paceline run --reference``)."""
