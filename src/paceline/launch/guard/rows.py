"""The values of an optimizer step that a rank sends (``record.watch.step_watch``)."""

from ...security.schema import Count

# Step, samples of the rank until its end and in it, loss, learning rate, gradient norm, checksum of
# the parameters (int64).
Row = tuple[Count, Count, Count, float | None, float | None, float | None, int | None]
