"""One target under atheris: the process that ``fuzz.__main__`` starts."""

import importlib
import sys

import atheris

target = sys.argv.pop(1)
with atheris.instrument_imports(include=["paceline", "fuzz"]):
    module = importlib.import_module(f"fuzz.targets.{target}")


def one(data: bytes) -> None:
    try:
        module.run(data)
    except (ValueError, OSError):  # told to the user in a line
        pass


atheris.Setup(sys.argv, one)
atheris.Fuzz()
