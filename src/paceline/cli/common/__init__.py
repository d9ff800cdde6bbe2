"""Code shared by several commands: options, error messages, sizes."""
