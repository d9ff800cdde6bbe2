"""Requirements of tests on the machine."""

import os

import pytest


def need(missing: list[str], hint: str = "make test-packages, and run as root") -> None:
    """Skip a test whose requirements are missing; fail it if PACELINE_ALL_TESTS=required."""
    if missing:
        text = f"this test needs {', '.join(missing)}. HINT: {hint}"
        if os.environ.get("PACELINE_ALL_TESTS") == "required":
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
