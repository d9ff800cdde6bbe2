"""The command ``paceline pack``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common.base import DATASETS, app, examples, exit_on_mistake, say
from .common.command import Command, print_json, with_options
from .common.guarded_process import run_guarded
from .common.options import NODES, HostAndEnvOptions, Json, bytes_of, flag, value_option

if TYPE_CHECKING:
    from ..data.packing.pack import PackReport
    from ..launch.options import LaunchOptions
    from ..study.packing import PackRequest

SAMPLES = "Samples"  # headings of options in --help
SHARDS = "Shards"
QUIET_S = 10.0  # seconds between progress lines without a terminal


@app.command(
    cls=Command,
    rich_help_panel=DATASETS,
    short_help="Write many small files into few large ones, with checksums",
    epilog=examples(
        ("paceline pack photos/ packed/", "a folder of images"),
        ("paceline pack tiles/ packed/ --labels labels.csv", "labels from a CSV file"),
        ("paceline pack photos/ small/ --resize 256", "smaller images"),
        ("paceline pack x.npy packed/ --labels y.npy --cast float16", "arrays"),
        ("paceline pack tiles.h5:bands packed/ --labels kind", "an HDF5 file"),
        ("paceline pack mine:samples packed/", "a Python generator"),
        ("paceline pack -n 8 photos/ packed/ --apply mine:cleaned", "preprocess on 8 processes"),
        ("paceline pack packed/ tars/ --to webdataset", "export"),
        ("paceline pack --check packed/", "verify every sample"),
    ),
)
@with_options
def pack(
    *,
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of files, a .npy file, HDF5, netCDF or zarr (FILE:ARRAY), LMDB, "
            "TFRecord or Parquet (FILE:COLUMN), tars of a webdataset, a packed dataset, or "
            "MODULE:FUNCTION that yields arrays, bytes, or (data, label). With --check: a packed "
            "dataset."
        ),
    ],
    dest: Annotated[
        Path | None, typer.Argument(help="Folder of the packed dataset.", show_default=False)
    ] = None,
    labels: Annotated[
        Path | None,
        value_option(
            "Labels: a CSV file with lines of file,label; a .npy file; the name of an array "
            "or column of SOURCE; the suffix of a tar's member. Default: the class of a file is "
            "its folder.",
            "LABELS",
        ),
    ] = None,
    check: Annotated[
        bool, flag("--check", "Read every byte of a packed dataset, and decode it. Pack nothing.")
    ] = False,
    to: Annotated[
        str | None,
        value_option(
            "Write hdf5, lmdb, tfrecord or webdataset instead of a packed dataset.", "FORMAT"
        ),
    ] = None,
    on_error: Annotated[
        str,
        value_option(
            "stop, or skip samples that cannot be read, and count them.",
            "stop|skip",
            show_default=True,
        ),
    ] = "stop",
    fresh: Annotated[
        bool, flag("--fresh", "Start again if DEST has a dataset or a part of one.")
    ] = False,
    follow_links: Annotated[
        bool,
        flag(
            "--follow-links",
            "Also read files outside of the folder of SOURCE that its links, external and "
            "virtual arrays, or LABELS refer to. Default: they are an error.",
        ),
    ] = False,
    json: Json = None,
    resize: Annotated[
        int | None,
        value_option(
            "Convert larger images to JPEGs with this shorter side (pixels).",
            "PIXELS",
            panel=SAMPLES,
            min=1,
        ),
    ] = None,
    quality: Annotated[
        int,
        value_option(
            "Quality of these JPEGs.", "N", panel=SAMPLES, min=1, max=100, show_default=True
        ),
    ] = 90,
    decode: Annotated[
        bool,
        flag(
            "--decode",
            "Store images as arrays: more bytes, no decoding in the training.",
            panel=SAMPLES,
        ),
    ] = False,
    compress: Annotated[
        bool, flag("--compress", "Compress arrays with zstd, lossless.", panel=SAMPLES)
    ] = False,
    cast: Annotated[
        str | None,
        value_option(
            "Convert arrays to this dtype, which must hold all values: float16.",
            "DTYPE",
            panel=SAMPLES,
        ),
    ] = None,
    apply: Annotated[
        str | None,
        value_option(
            "Store the result of this function for each sample's array: preprocessing that "
            "is the same in every epoch. Random augmentation belongs into the Loader.",
            "MODULE:FUNCTION",
            panel=SAMPLES,
        ),
    ] = None,
    statistics: Annotated[
        int,
        value_option(
            "Number of samples for mean and standard deviation.",
            "N",
            panel=SAMPLES,
            min=0,
            show_default=True,
        ),
    ] = 4096,
    shard_size: Annotated[
        str, value_option("Target shard size, 64M to 1G.", "SIZE", panel=SHARDS, show_default=True)
    ] = "256M",
    seed: Annotated[
        int, value_option("Seed of the order of samples.", "N", panel=SHARDS, show_default=True)
    ] = 0,
    stripe: Annotated[
        str | None,
        value_option(
            "On Lustre: stripe each file over this number of storage targets (all; auto: 4, "
            "or 16 with --to hdf5 or lmdb), with lfs setstripe on DEST. Without it, a message "
            "proposes a number if files would be on fewer.",
            "N",
            panel=SHARDS,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        value_option(
            "Number of processes, on this node, the allocation or the hosts of -H: for "
            "--apply with a function that holds Python's global interpreter lock, and for several "
            "nodes. Default: threads of this node; with -H one for each core.",
            "N",
            "-n",
            "--ranks",
            panel=NODES,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        value_option("Threads of each rank. Default: two for each core.", "N", panel=NODES, min=1),
    ] = None,
    nodes: HostAndEnvOptions,
) -> None:
    """Write many small files into few large ones, in random order, with a checksum per sample.

    Parallel file systems are slow for one file per sample. A packed dataset is read at the speed
    of large files, and damaged samples are detected. If the command is killed, repeat it: it
    continues, on any number of ranks. paceline.data.Loader reads packed datasets.

    Exit code 1: --check found damaged samples.
    """
    with exit_on_mistake():
        from ..data.packing.pack import PackOptions
        from ..launch.options import LaunchOptions
        from ..study.packing import PackRequest

        on_ranks = ranks is not None or bool(nodes.words())
        where = LaunchOptions(ranks, nodes) if on_ranks else None
        if nodes.env and not on_ranks:
            raise ValueError(f"--env {nodes.env[0]} needs ranks. HINT: add -n or -H")
        if check:
            if dest is not None:
                raise ValueError(
                    f"--check takes one folder; {dest} is a second one. HINT: leave out {dest}"
                )
            _of_one_process(where, "--check")
            code = _check(Path(source), workers, json)
            raise typer.Exit(code)
        if dest is None:
            raise ValueError("the destination folder is missing. HINT: paceline pack SOURCE DEST")
        encoding: dict[str, Any] = {
            "decode": decode,
            "resize": resize,
            "quality": quality,
            "compress": compress,
            "cast": cast,
        }
        shard_bytes = bytes_of(shard_size, "--shard-size")
        wish = PackOptions(shard_bytes, seed, statistics, on_error, fresh, follow_links)
        table = None if labels is None else str(labels)
        asked = PackRequest(source, str(dest), table, apply, workers, encoding, wish)
        work = partial(_pack, asked, where, to, json, _striping(dest, to, stripe))
        library = "" if on_ranks else _library(source)
        if library:  # a C library, which may not validate all of its input
            run_guarded(work, partial(_at_fault, source, library), hangs=apply is None)
        else:
            work()


def _striping(dest: Path, to: str | None, count: str | None) -> Callable[[Path], None] | None:
    """Return the function that stripes the output; without --stripe, print a proposal.

    Raises:
        ValueError: The value of --stripe is invalid.
    """
    from ..data.packing import striping

    if count is None:
        if proposal := striping.propose(dest, to):
            say(proposal)
        return None
    return partial(striping.stripe, count=striping.check_count(count), to=to)


def _pack(
    asked: "PackRequest",
    where: "LaunchOptions | None",
    to: str | None,
    json: Path | None,
    prepare: Callable[[Path], None] | None,
) -> None:
    if to is None and prepare is not None:
        prepare(Path(asked.dest))
    if to is not None:
        _of_one_process(where, "--to")
    with progress("packed" if to is None else "done", None) as step:
        report = _write_dataset(asked, where, to, prepare, step)
    meta = asdict(report.meta)
    if json is not None:
        more = {"left_out": report.left_out, "notes": report.notes, "seconds": report.seconds}
        print_json({"folder": asked.dest, **meta, **more}, json, name="paceline-pack")
        return
    from ..report.terminal.draw import print_blocks
    from ..report.terminal.packed_dataset import packed_blocks

    print_blocks(packed_blocks(meta, report.left_out, report.notes, report.seconds))


def _library(source: str) -> str:
    """Return the library that reads the source if it has another file format, or ""."""
    from ..data.sources import formats

    kind = formats.detect_format(formats.split_path(source)[0])
    return formats.FORMATS[kind].library if kind else ""


def _at_fault(source: str, library: str, what: str) -> str:
    return (
        f"{source}: {library} {what} while reading this file, which is damaged. HINT: copy it "
        "again, or examine it with h5dump, ncdump or mdb_stat"
    )


def _write_dataset(
    asked: "PackRequest",
    where: "LaunchOptions | None",
    to: str | None,
    prepare: Callable[[Path], None] | None,
    step: Callable[[int, int], None],
) -> "PackReport":
    """Pack on ranks or in this process, or export to another format."""
    from ..data.packing.export import convert
    from ..data.packing.pack import pack
    from ..study.packing import pack_on_ranks

    if where is not None:
        return pack_on_ranks(asked, where, step)
    how = {**asked.encoding, "apply": asked.encoding_options.apply, **asdict(asked.wish)}
    options = {**how, "workers": asked.workers, "step": step}
    if to is not None:
        return convert(asked.source, asked.dest, to, asked.labels, prepare=prepare, **options)
    _propose_ranks()
    return pack(asked.source, asked.dest, asked.labels, **options)


def _of_one_process(where: "LaunchOptions | None", option: str) -> None:
    if where is not None:
        raise ValueError(
            f"{option} runs in one process. HINT: leave out -n, -H, --hostfile and --launcher; "
            f"use {option} on the result of paceline pack -n"
        )


def _propose_ranks() -> None:
    """Print how to use all hosts, if this process runs inside an allocation."""
    import os
    from contextlib import suppress

    from ..cluster.schedulers.detect import find_allocation

    with suppress(ValueError):  # inconsistent allocation; not needed for this hint
        found = find_allocation(dict(os.environ))
        if found is not None:
            job = f"{found.scheduler} job {found.job}"
            say(f"threads of this node pack; -n N uses ranks on all nodes of {job}")


def _check(folder: Path, workers: int | None, json: Path | None) -> int:
    from ..data.format.shard_format import load_meta
    from ..data.shards import verify

    meta, began = load_meta(folder), time.monotonic()
    with progress("read back", meta.samples) as step:
        bad = verify(folder, workers, step)
    lines = [*map(str, bad)]
    if json is not None:
        found = {"folder": str(folder), "samples": meta.samples, "bad": lines}
        print_json(found, json, name="paceline-pack-check")
    else:
        from ..report.terminal.draw import print_blocks
        from ..report.terminal.packed_dataset import checked_blocks

        took = time.monotonic() - began
        print_blocks(checked_blocks(str(folder), asdict(meta), lines, took))
    return int(bool(bad))


@contextmanager
def progress(
    what: str, whole: int | None, each: str = "samples"
) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr: an updated line on a terminal, else a line every ``QUIET_S``."""
    from ..report.console import PlainConsole
    from ..report.terminal.packed_dataset import progress as told

    console, began = PlainConsole(stderr=True), time.monotonic()
    every = 0.2 if console.is_terminal else QUIET_S
    due = began + every
    moved = False

    def step(done: int, read: int) -> None:
        nonlocal due, moved
        now = time.monotonic()
        if now < due:
            return
        due, moved = now + every, True
        line = f"paceline: {told(what, done, whole, read, done / (now - began), each)}"
        console.file.write(f"\r\x1b[2K{line}" if console.is_terminal else f"{line}\n")
        console.file.flush()

    try:
        yield step
    finally:
        if moved and console.is_terminal:
            console.file.write("\r\x1b[2K")
            console.file.flush()
