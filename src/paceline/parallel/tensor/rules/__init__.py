"""Rules for functions of torch that compute with pieces of split tensors."""
