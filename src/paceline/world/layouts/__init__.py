"""Distribution of models in their layouts, as training scripts use it."""
