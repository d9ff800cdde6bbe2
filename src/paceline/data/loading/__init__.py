"""Load batches: the Loader, its workers, and the datasets that it accepts."""
