"""``paceline scale``: run a script on several numbers of ranks, here or in jobs of a scheduler."""
