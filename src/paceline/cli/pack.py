"""The command ``paceline pack``."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common.base import app, exit_on_mistake
from .common.guarded_process import run_guarded
from .common.options import Env, Hostfile, Hosts, Launcher
from .common.sizes import bytes_of

if TYPE_CHECKING:
    from ..data.packing.pack import PackReport
    from ..study.packing import PackRequest, RankPlacement

QUIET_S = 10.0  # seconds between progress lines without a terminal


@app.command(
    epilog="Examples:  paceline pack photos/ packed/   ·   "
    "paceline pack tiles/ packed/ --labels labels.csv   ·   "
    "paceline pack photos/ small/ --resize 256   ·   "
    "paceline pack x.npy packed/ --labels y.npy --cast float16 --compress   ·   "
    "paceline pack mine:samples packed/   ·   "
    "paceline pack tiles.h5:bands packed/ --apply mine:upsampled   ·   "
    "paceline pack -n 8 photos/ packed/ --apply mine:cleaned   ·   "
    "paceline pack -H host1:32,host2:32 photos/ packed/   ·   "
    "paceline pack tiles.h5:bands packed/ --labels kind   ·   "
    "paceline pack packed/ tars/ --to webdataset   ·   paceline pack --check packed/",
)
def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of files, a .npy file, HDF5, netCDF or zarr (FILE:ARRAY), LMDB, "
            "TFRecord or Parquet (FILE:COLUMN), a webdataset's tars, a packed set, or "
            "MODULE:FUNCTION that yields arrays, bytes, or (data, label). With --check: the "
            "packed set."
        ),
    ],
    dest: Annotated[
        Path | None, typer.Argument(help="The folder to pack into.", show_default=False)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            help="Processes in all, on this host, on all of the allocation or on -H's hosts: for "
            "--apply with a function that holds Python's lock, and for several hosts. Default: "
            "threads of this host; with -H its slots, else a rank a core.",
            show_default=False,
        ),
    ] = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    launcher: Launcher = None,
    env: Env = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Pack nothing: read every byte of a packed set back, and decode it."
        ),
    ] = False,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="A CSV of file and label (or several numbers) a line; of a .npy file another "
            "one; of a file of arrays or columns the name of theirs; of tars the end of a member. "
            "Default: a file's class is the folder that it is in.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Write hdf5, lmdb, tfrecord or webdataset in the place of a packed set.",
            show_default=False,
        ),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            help="Images whose shorter side is longer than this become JPEGs of that size.",
            show_default=False,
            min=1,
        ),
    ] = None,
    quality: Annotated[int, typer.Option(help="Of --resize's JPEGs.", min=1, max=100)] = 90,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Images as arrays: no decoding in training, more bytes."),
    ] = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Arrays with zstd, without loss.")
    ] = False,
    cast: Annotated[
        str | None,
        typer.Option(
            help="Arrays to this dtype, as float16; it must hold all values.",
            metavar="DTYPE",
            show_default=False,
        ),
    ] = None,
    apply: Annotated[
        str | None,
        typer.Option(
            help="Pack what this makes of each sample's array: work that is always the same is "
            "done once and not in each epoch. What is drawn at random stays in the Loader.",
            metavar="MODULE:FUNCTION",
            show_default=False,
        ),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Of a shard, about: 64M to 1G.")] = "256M",
    seed: Annotated[int, typer.Option(help="Of the order that samples are packed in.")] = 0,
    statistics: Annotated[
        int, typer.Option(help="Samples whose mean and deviation are taken.", min=0)
    ] = 4096,
    workers: Annotated[
        int | None,
        typer.Option(help="Threads, of each rank. Default: two a core.", min=1, show_default=False),
    ] = None,
    stripe: Annotated[
        str | None,
        typer.Option(
            help="On Lustre: number of storage targets over which each file is striped, or all, or "
            "auto: 4; 16 with --to hdf5 or lmdb. Sets the layout of DEST (lfs setstripe). Without "
            "it, a message proposes a number where files would lie on fewer.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="stop, or skip what can't be read, with a count.")
    ] = "stop",
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Anew, where DEST holds a set or part of one already."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output instead of a table.")
    ] = False,
) -> None:
    """Many small files into few large ones, in random order, each sample with a checksum.

    Reading a file a sample is slow on every parallel file system, and its servers' time is
    everybody's. A packed set is read at the speed of large files, and a flipped byte is noticed.
    Stopped or killed, the same command goes on where it was, on any number of ranks.
    paceline.data.Loader reads it.

    Exit code 1 where --check has found something.
    """
    with exit_on_mistake():
        from ..data.packing.pack import PackOptions
        from ..study.packing import PackRequest, RankPlacement

        where = RankPlacement(ranks, hosts, hostfile, launcher, tuple(env or ()))
        if env and not where:
            raise ValueError(f"--env {env[0]}: is for ranks. HINT: with -n or -H")
        if check:
            if dest is not None:
                raise ValueError(f"--check takes one folder, and {dest} is a second. HINT: one")
            _of_one_process(where, "--check")
            code = _check(Path(source), workers, json)
            raise typer.Exit(code)
        if dest is None:
            raise ValueError("where to? HINT: paceline pack SOURCE DEST")
        encoding: dict[str, Any] = {
            "decode": decode,
            "resize": resize,
            "quality": quality,
            "compress": compress,
            "cast": cast,
        }
        shard_bytes = bytes_of(shard_size, "--shard-size")
        wish = PackOptions(shard_bytes, seed, statistics, on_error, fresh)
        table = None if labels is None else str(labels)
        asked = PackRequest(source, str(dest), table, apply, workers, encoding, wish)
        work = partial(_pack, asked, where, to, json, _striping(dest, to, stripe))
        library = "" if where else _library(source)
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
            typer.echo(f"paceline: {proposal}", err=True)
        return None
    return partial(striping.stripe, count=striping.check_count(count), to=to)


def _pack(
    asked: "PackRequest",
    where: "RankPlacement",
    to: str | None,
    json: bool,
    prepare: Callable[[Path], None] | None,
) -> None:
    report = _packed(asked, where, to, prepare)
    meta = asdict(report.meta)
    if json:
        more = {"left_out": report.left_out, "notes": report.notes, "seconds": report.seconds}
        typer.echo(dumps({"folder": asked.dest, **meta, **more}))
        return
    from ..report.console import PlainConsole
    from ..report.terminal import packed_dataset as shown

    PlainConsole().print(shown.render(meta, report.left_out, report.notes, report.seconds))


def _library(source: str) -> str:
    """Return the library that reads the source if it has another file format, or ""."""
    from ..data.sources import formats

    kind = formats.detect_format(formats.split_path(source)[0])
    return formats.FORMATS[kind].library if kind else ""


def _at_fault(source: str, library: str, what: str) -> str:
    return (
        f"{source}: {library} {what} while it read this: the file is damaged. HINT: copy it "
        "again, or see what h5dump, ncdump, mdb_stat ... say of it"
    )


def _packed(
    asked: "PackRequest",
    where: "RankPlacement",
    to: str | None,
    prepare: Callable[[Path], None] | None,
) -> "PackReport":
    from ..data.packing.export import convert
    from ..data.packing.pack import pack
    from ..study.packing import pack_on_ranks

    if to is None and prepare is not None:
        prepare(Path(asked.dest))
    with progress("packed" if to is None else "done", None) as step:
        if where and to is None:
            return pack_on_ranks(asked, where, step)
        if to is not None:
            _of_one_process(where, "--to")
        else:
            _all_of_it()
        how = {**asked.encoding, "apply": asked.encoding_options.apply, **asdict(asked.wish)}
        options = {**how, "workers": asked.workers, "step": step}
        if to is None:
            return pack(asked.source, asked.dest, asked.labels, **options)
        return convert(asked.source, asked.dest, to, asked.labels, prepare=prepare, **options)


def _of_one_process(where: "RankPlacement", option: str) -> None:
    if where:
        raise ValueError(
            f"{option} is done by one process. HINT: without -n, -H, --hostfile and --launcher; "
            "paceline pack -n packs, and --to and --check take what it has packed"
        )


def _all_of_it() -> None:
    """Print how to use all hosts, if this process runs inside an allocation."""
    import os
    from contextlib import suppress

    from ..cluster.schedulers.detect import find_allocation

    with suppress(ValueError):  # inconsistent allocation; not needed for this hint
        found = find_allocation(dict(os.environ))
        if found is not None:
            job = f"{found.scheduler} job {found.job}"
            typer.echo(
                f"paceline: threads of this host pack; with -n N ranks of all of {job} do",
                err=True,
            )


def _check(folder: Path, workers: int | None, json: bool) -> int:
    from ..data.format.shard_format import load_meta
    from ..data.verify import verify

    meta, began = load_meta(folder), time.monotonic()
    with progress("read back", meta.samples) as step:
        bad = verify(folder, workers, step)
    lines = [str(one) for one in bad]
    if json:
        typer.echo(dumps({"folder": str(folder), "samples": meta.samples, "bad": lines}))
    else:
        from ..report.console import PlainConsole
        from ..report.terminal import packed_dataset as shown

        took = time.monotonic() - began
        PlainConsole().print(shown.render_check(str(folder), asdict(meta), lines, took))
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
