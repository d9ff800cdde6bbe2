"""What a layout is made of: strategies, and what the training loop may ask of a model."""
