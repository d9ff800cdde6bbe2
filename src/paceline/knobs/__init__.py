"""Knobs: settings that Paceline changes in each rank without an edit of the training script."""
