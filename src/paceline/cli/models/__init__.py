"""Commands that write a trained model to a file of another kind."""
