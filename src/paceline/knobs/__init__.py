"""What can be set from outside of a training script, and how it is set in each rank."""
