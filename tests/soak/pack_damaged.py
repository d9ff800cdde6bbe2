"""Pack randomly damaged copies of files of other formats with ``paceline pack``.

    python pack_damaged.py FOLDER SEED SECONDS

FOLDER contains the undamaged files. The program prints one line of JSON per copy: the source, the
damage, the exit and the output of the command, and the state of the packed dataset. The command
runs in a fork, so that packages are imported only once.
"""

import contextlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from paceline.cli import main as command
from paceline.cli.common import guarded_process
from paceline.data.format.shard_format import META_FILE, load_meta
from paceline.data.shards import verify
from paceline.data.sources.formats import FORMATS

TIMEOUT_S, HUNG_S = 30.0, 3.0
IMPORTED = (
    *("h5py", "netCDF4", "zarr", "lmdb", "pyarrow.parquet", "google.protobuf.message_factory"),
    *(
        "simplejpeg",
        "PIL.Image",
        "paceline.data.packing.export",
        "paceline.report.terminal.packed_dataset",
        "rich.console",
    ),
    *(f"paceline.data.sources.formats.{kind.module}" for kind in FORMATS.values()),
)
KINDS = ("cut", "flip", "flips", "zeros", "noise")


def damage(source: Path, draw: random.Random) -> str:
    """Damage one file of a dataset in one or several places; return a description of the damage.

    Half of the damages are near the start of the file, where most metadata is.
    """
    files = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    # Only for zarr can a missing file be detected.
    kind = draw.choice((*KINDS, "gone") if source.suffix == ".zarr" else KINDS)
    at = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 2048))
    if kind == "cut":
        at += at in records(data)  # a cut between two records can't be detected
        del data[at:]
    elif kind == "zeros":
        # Zeros up to the end of a tar file can't be detected.
        end = min(at + draw.choice((16, 512, 4096)), len(data.rstrip(b"\0")) - 1)
        data[at:end] = bytes(max(end - at, 0))
    elif kind == "noise":
        end = min(at + draw.choice((8, 64)), len(data))
        data[at:end] = draw.randbytes(end - at)
    elif kind != "gone":
        places = [at] if kind == "flip" else [draw.randrange(len(data)) for _ in range(20)]
        for place in places:
            data[place] ^= 1 << draw.randrange(8)
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{kind} in {path.name} at {at}"


def records(data: bytes) -> set[int]:
    """Return the offsets of a TFRecord file's records; for other files, some harmless offsets."""
    found, at = set(), 0
    while at < len(data) and len(found) < 1000:
        found.add(at)
        at += int.from_bytes(data[at : at + 8], "little") + 16
    return found


def packed(source: Path, dest: Path, told: Path) -> str:
    """Pack a dataset; return the command's exit code, the signal that ended it, or "hangs"."""
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(f"{told}.{number}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["paceline", "pack", str(source), str(dest), "--json"]
        code = 1
        try:
            command()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        if ended:
            return str(os.WEXITSTATUS(status))
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def main() -> None:
    folder, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for name in IMPORTED:
        importlib.import_module(name)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        sys.argv[1:] = ["--version"]  # imports the modules of the command line
        command()
    guarded_process.HUNG_S = HUNG_S
    draw, end = random.Random(seed), time.monotonic() + seconds
    sources = sorted(folder.iterdir())
    work = folder.with_name("work")
    while time.monotonic() < end:
        for source in sources:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            copy, dest = work / source.name, work / "set"
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
            done = damage(copy, draw)
            ended = packed(copy, dest, work / "told")
            found = {"source": source.name, "damage": done, "ended": ended}
            found["said"] = (work / "told.2").read_text(errors="replace")
            found["samples"] = found["bad"] = None
            if (dest / META_FILE).exists():
                found["samples"] = load_meta(dest).samples
                found["bad"] = len(verify(dest, workers=1))
                found["notes"] = json.loads((work / "told.1").read_text())["notes"]
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
