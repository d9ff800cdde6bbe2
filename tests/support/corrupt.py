"""Random damage to a packed dataset, and its detection."""

import random
import shutil
from pathlib import Path

from paceline.data import DataError
from paceline.data.shards import verify


def damaged(whole: Path, copy: Path, draw: random.Random) -> str:
    """Copy a dataset, damage one of its files and return a description of the damage."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    path = draw.choice(sorted(copy.iterdir()))
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    kind = draw.choice(("flip", "flip", "flip", "byte", "swap", "cut", "longer", "gone", "zeros"))
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        data[at] = (data[at] + draw.randrange(1, 256)) % 256
    elif kind == "swap":
        other = draw.randrange(len(data))
        if data[at] == data[other]:
            data[at] ^= 1
        data[at], data[other] = data[other], data[at]
    elif kind == "cut":
        del data[at:]
    elif kind == "longer":
        data += bytes(draw.randrange(1, 100))
    elif kind == "zeros":
        data[at : at + 64] = bytes(x ^ 255 for x in data[at : at + 64])
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{kind} in {path.name} at {at}"


def noticed(folder: Path) -> list[DataError]:
    """Return the errors of a damaged dataset; any exception other than DataError is raised."""
    try:
        return verify(folder, workers=1)
    except DataError as error:
        return [error]
