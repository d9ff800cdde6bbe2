"""What a training loop does, decided from the notes of the hooks; needs no torch."""
