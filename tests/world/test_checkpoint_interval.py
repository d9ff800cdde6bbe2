"""Checkpoint intervals as users write them."""

import pytest

from paceline.world.checkpointing import CheckpointInterval


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("epoch", 1, "epoch"),
        ("2 epochs", 2, "epoch"),
        (500, 500, "step"),
        ("500", 500, "step"),
        ("500 steps", 500, "step"),
        ("30s", 30, "second"),
        ("10min", 600, "second"),
        ("1.5 h", 5400, "second"),
    ],
)
def test_checkpoint_interval_is_parsed(text, number, unit):
    assert CheckpointInterval.parse(text) == CheckpointInterval(number, unit)


@pytest.mark.parametrize("text", ["", "often", "0", 0, "-3", "1.5 steps", "10 parsecs", "0s"])
def test_invalid_checkpoint_interval_is_rejected_with_hint(text):
    with pytest.raises(ValueError, match=r"this is .*HINT: every='epoch'"):
        CheckpointInterval.parse(text)
