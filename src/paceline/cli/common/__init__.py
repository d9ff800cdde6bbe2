"""What several commands share: options, errors, sizes."""
