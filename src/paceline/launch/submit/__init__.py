"""``paceline submit``: write a batch script for the cluster's scheduler and submit it."""
