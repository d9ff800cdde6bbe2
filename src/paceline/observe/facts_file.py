"""The files of ``RankFacts``.

A rank writes ``facts-RANK.json`` and ``facts-RANK.npz`` into the folder of the run. The array
``sketches`` of the latter has one row for each tensor that was observed (``sketch.SketchTable``).
"""

import json
import zipfile
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np

from ..security.files import read_regular
from .facts.ranks import RankFacts

VERSION = 1
MAX_FACTS_MIB = 512  # of one file


def write_facts(folder: Path, facts: RankFacts) -> None:
    """Write the files of one rank. Where the JSON file exists, both are complete."""
    np.savez(folder / f"facts-{facts.rank}.npz", sketches=facts.sketches)
    rest = {name: value for name, value in asdict(facts).items() if name != "sketches"}
    text = json.dumps({"version": VERSION, **rest}, separators=(",", ":"))
    part = folder / f"facts-{facts.rank}.part"
    part.write_text(text)
    part.replace(folder / f"facts-{facts.rank}.json")


def read_facts(folder: Path, rank: int) -> RankFacts:
    """Read the files of one rank.

    Raises:
        OSError: A file does not exist.
        ValueError: It is of another version or damaged.
    """
    path, arrays_path = (folder / f"facts-{rank}.{kind}" for kind in ("json", "npz"))
    try:
        loaded = json.loads(read_regular(path, MAX_FACTS_MIB << 20))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(loaded, dict) or loaded.pop("version", None) != VERSION:
        raise ValueError(f"{path} is not a file of this version of paceline verify")
    try:
        with np.load(arrays_path, allow_pickle=False) as arrays:
            sketches = arrays["sketches"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{arrays_path} is damaged: {error}") from None
    try:
        return msgspec.convert(
            loaded | {"sketches": sketches}, RankFacts, dec_hook=lambda kind, value: value
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
