"""``paceline tune``: hyper-parameter search on Optuna, whose trials are distributed jobs."""
