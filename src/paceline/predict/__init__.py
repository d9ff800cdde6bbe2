"""What a change would gain, before it is tried. No torch."""
