"""What ``paceline run --tune-exchange`` asks of every rank (comm/tune)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .settings import SettingsFile

VARIABLE = "PACELINE_TUNE"
BY = "--tune-exchange"  # in a settings file's table ``made``


@dataclass(frozen=True)
class Tuning:
    """file: where the answer is kept. script: of whom it is. gloo: what all-reduces go through if
    nobody tunes them, whatever the group is made for. bf16: whether gradients may travel so."""

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
    """Its table ``made``. Raises ValueError where something else wrote it."""
    found = tree.get("made", {})
    if found.get("by") != BY:
        raise ValueError(
            f"{path} is there, and {BY} has not written it. HINT: another name; its "
            "knobs are taken by --settings"
        )
    return dict(found)
