"""Scaling studies: runs of a script on several numbers of ranks, and figures derived from them."""
