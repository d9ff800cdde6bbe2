"""Options of ``paceline run --tune-exchange`` that are passed to every rank (comm/tune)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .settings import SettingsFile

VARIABLE = "PACELINE_TUNE"
BY = "--tune-exchange"  # value of ``by`` in the settings file's table ``made``


@dataclass(frozen=True)
class Tuning:
    """Options of the tuner.

    Attributes:
        file: Settings file to which the result is written.
        script: Name of the script.
        gloo: Whether all-reduces that are not tuned use gloo instead of the group's backend.
        bf16: Whether gradients may be exchanged in bfloat16.
    """

    file: str
    script: str
    gloo: bool = False
    bf16: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Tuning":
        return cls(**json.loads(text))


def made(path: Path, tree: SettingsFile) -> dict[str, Any]:
    """Return the table ``made`` of a settings file.

    Raises:
        ValueError: The file was not written by ``--tune-exchange``.
    """
    found = tree.get("made", {})
    if found.get("by") != BY:
        raise ValueError(
            f"{path} exists, and {BY} did not write it. HINT: give another file name, or use its "
            "knobs with --settings"
        )
    return dict(found)
