"""Starting ranks and watching over them."""
