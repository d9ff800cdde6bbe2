"""Run one target under atheris; ``fuzz.__main__`` starts this process."""

import importlib
import sys

import atheris

target = sys.argv.pop(1)
with atheris.instrument_imports(include=["paceline", "fuzz"]):
    module = importlib.import_module(f"fuzz.targets.{target}")


def one(data: bytes) -> None:
    try:
        module.run(data)
    except (ValueError, OSError):  # reported to the user in one line
        pass


atheris.Setup(sys.argv, one)
atheris.Fuzz()
