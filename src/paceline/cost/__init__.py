"""Cost of work on a machine: measured figures, vendor specifications, and performance limits."""
