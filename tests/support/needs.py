"""What a test needs of the machine."""

import os

import pytest


def need(missing: list[str], hint: str = "make test-packages, and run as root") -> None:
    """Skip a test that this machine cannot run; fail it where none may be skipped."""
    if missing:
        text = f"this test needs {', '.join(missing)}. HINT: {hint}"
        if os.environ.get("PACELINE_ALL_TESTS") == "required":
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
