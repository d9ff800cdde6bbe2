"""paceline submit: a batch script for the cluster's scheduler, written and handed in."""
