"""What keeps large batches converging."""
