"""Run cases on every rank of one job; each is a function of rank and size."""

import json
import traceback
from pathlib import Path

import pytest


def raises(kind, text, function, *args, **options):
    """Check that a call raises an exception with this text in its message."""
    with pytest.raises(kind) as caught:
        function(*args, **options)
    assert text in str(caught.value), str(caught.value)


def run_cases(hvd, cases, folder):
    """Run all cases on this rank, and write what failed."""
    hvd.init()
    rank, size, found = hvd.rank(), hvd.size(), {}
    for name, function in cases.items():
        try:
            function(rank, size)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
