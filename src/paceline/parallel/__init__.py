"""How a model is cut over ranks. Here: data parallel."""
