"""Report as one self-contained HTML page that loads nothing from the network."""
