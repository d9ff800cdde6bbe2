"""What ``paceline verify`` observes of a training in one rank. These modules need no torch.

The facts refer to tensors by the numbers of rows in ``RankFacts.sketches``.

Lines are "FILE:LINE" of the user's code, relative to the working directory; "" if none is known.
"""
