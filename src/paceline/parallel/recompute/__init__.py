"""What blocks keep from forward to backward: recomputation, and activations on the host."""
