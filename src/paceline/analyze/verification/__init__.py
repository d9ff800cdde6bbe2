"""Is the training of N ranks that of one process? Rules on the facts of ``observe``."""
