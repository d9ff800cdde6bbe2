"""``paceline check --pack-env``: pack an environment into one file and measure its import time."""
