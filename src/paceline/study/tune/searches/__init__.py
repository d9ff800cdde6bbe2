"""The searches of ``paceline tune``: samplers and pruners of Optuna, and those of Paceline."""
