"""Parts of the terminal text of a diagnosis."""
