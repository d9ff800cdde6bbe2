"""The ranks of a group: proof of membership, and Paceline's own objects between them."""
