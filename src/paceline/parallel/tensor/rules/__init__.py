"""Rules for functions of torch with pieces of split tensors; the modules register them."""
