"""A dataset that ranks pack in pieces.

Each piece is packed once. After a kill, one process can continue with the pieces.
"""

import shutil
import threading
from contextlib import suppress

import numpy as np
import pytest
import sets

from paceline.data import Shards, pack
from paceline.data.format.shard_format import renumber_shard
from paceline.data.packing.encode import EncodedSample, EncodingOptions
from paceline.data.packing.pack import PackOptions, open_pack_job
from paceline.data.packing.pieces import Partition, PieceClaims, PieceWriter, piece_name
from paceline.data.packing.statistics import Statistics

WISH = PackOptions(shard_bytes=2000)


def nothing(*_):
    return None


def some_packed(x, y, folder, count, wish=WISH, ranks=2):
    """Pack ``count`` pieces as a rank does that is then killed; return the number of all pieces."""
    with open_pack_job((x, y), folder, None, EncodingOptions(), wish, nothing) as job:
        cut = job.partition(ranks)
        run = job.work / "run-killed"
        run.mkdir()
        pieces = PieceWriter(
            cut, job.work, run, wish.shard_bytes, job.writer.images, job.writer.classes
        )
        pieces.pack(job.encoder, range(count), 2, nothing)
        (run / piece_name(count)).mkdir()
        # as a kill leaves it, without cleanup
        shutil.copytree(job.work, folder.with_name("work"))
    shutil.move(folder.with_name("work"), folder / ".packing")
    return len(cut)


def content(folder):
    """Return the bytes, label and row of each sample, without its position."""
    shards = Shards(folder)
    rows = [shards.row(i) for i in range(len(shards))]
    return [
        (shards[i][0].tobytes(), row.label, row.length, row.shape, row.dtype, row.encoding)
        for i, row in enumerate(rows)
    ]


def test_index_rows_are_renumbered_for_another_shard():
    packed = EncodedSample(0, (3,), "int16", [b"abcdef"], 6, 7, 0x12345678, "")
    for one, other in ((0, 1), (5, 70_000), (9, 9)):
        rows = b"".join(packed.row(one, offset) for offset in (0, 6, 1 << 40))
        wanted = b"".join(packed.row(other, offset) for offset in (0, 6, 1 << 40))
        assert renumber_shard(rows, one, other) == wanted


@pytest.mark.parametrize(
    ("samples", "size", "ranks", "each"),
    [(1000, 10, 4, 63), (100_000, 10, 4, 90), (3, 10, 4, 1), (1000, 10_000, 1, 1)],
)
def test_piece_size_depends_on_shard_size_and_ranks(samples, size, ranks, each):
    cut = Partition.of((0, samples), size, 1000, ranks, None)
    assert cut.each == each
    places = [place for piece in range(len(cut)) for place in range(*cut.span(piece))]
    assert places == list(range(samples))
    assert all(cut.piece(place) == place // each for place in places)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_each_piece_is_claimed_by_one_rank(tmp_path, size):
    pieces, taken = list(range(3, 200, 2)), []
    start = threading.Barrier(size)

    def take(rank):
        start.wait()
        for number, piece in enumerate(PieceClaims(tmp_path, pieces, rank, size)):
            taken.append(piece)
            if rank == 1 and number == 2:
                return  # this rank stops, and the others take the rest

    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == pieces


def test_one_process_resumes_from_packed_pieces(tmp_path):
    x, y = sets.arrays(400)
    pack(x, tmp_path / "whole", y, shard_bytes=2000)
    count = some_packed(x, y, tmp_path / "out", 3)
    assert count > 6
    seen = []
    report = pack(
        (x, y), tmp_path / "out", shard_bytes=2000, step=lambda done, size: seen.append(done)
    )
    assert report.went_on_at == 400 - len(seen) > 0
    assert seen == list(range(report.went_on_at + 1, 401))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    whole, out = Shards(tmp_path / "whole").meta, Shards(tmp_path / "out").meta
    assert out.statistics["mean"] == pytest.approx(whole.statistics["mean"], rel=1e-12)
    assert out.statistics["deviation"] == pytest.approx(whole.statistics["deviation"], rel=1e-12)
    assert out.statistics["classes"] == whole.statistics["classes"]
    assert not (tmp_path / "out" / ".packing").exists()


def test_pieces_start_after_shards_of_interrupted_packing(tmp_path):
    def stop(done, size):
        if done == 100:
            raise KeyboardInterrupt

    x, y = sets.arrays(400)
    pack((x, y), tmp_path / "whole", shard_bytes=2000)
    with pytest.raises(KeyboardInterrupt):
        pack((x, y), tmp_path / "out", shard_bytes=2000, step=stop)
    with (
        suppress(KeyboardInterrupt),
        open_pack_job((x, y), tmp_path / "out", None, EncodingOptions(), WISH, nothing) as job,
    ):
        first = job.partition(3).first
        raise KeyboardInterrupt
    assert 0 < first <= 100
    assert pack((x, y), tmp_path / "out", shard_bytes=2000).went_on_at == first
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["shorter", "missing", "state"])
def test_damaged_piece_is_packed_again(tmp_path, damage):
    x, y = sets.arrays(400)
    some_packed(x, y, tmp_path / "out", 4)
    piece = tmp_path / "out" / ".packing" / piece_name(2)
    shard = piece / "shard-00000.bin"
    if damage == "shorter":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "missing":
        shard.unlink()
    else:
        (piece / "whole.json").write_text("{")
    pack((x, y), tmp_path / "out", shard_bytes=2000)
    pack((x, y), tmp_path / "whole", shard_bytes=2000)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_joining_pieces_resumes_after_kill(tmp_path, monkeypatch):
    from paceline.data.packing.shard_writer import ShardWriter

    x, y = sets.arrays(400)
    count = some_packed(x, y, tmp_path / "out", 3)
    adopt, adopted = ShardWriter.adopt_piece, []

    def killed(self, part):
        adopt(self, part)
        adopted.append(part)
        if len(adopted) == count // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "adopt_piece", killed)
    with pytest.raises(KeyboardInterrupt):
        pack((x, y), tmp_path / "out", shard_bytes=2000)
    monkeypatch.undo()
    assert pack((x, y), tmp_path / "out", shard_bytes=2000).went_on_at == 400
    pack((x, y), tmp_path / "whole", shard_bytes=2000)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_late_rank_of_killed_job_is_harmless(tmp_path):
    x, y = sets.arrays(400)
    folder = tmp_path / "out"
    with open_pack_job((x, y), folder, None, EncodingOptions(), WISH, nothing) as job:
        cut = job.partition(2)
        late, soon = job.work / "run-late", job.work / "run-soon"
        for run in (late, soon):
            run.mkdir()
        of_late = PieceWriter(cut, job.work, late, WISH.shard_bytes, False, False)
        PieceWriter(cut, job.work, soon, WISH.shard_bytes, False, False).pack(
            job.encoder, range(len(cut)), 2, nothing
        )
        of_late.pack(job.encoder, [1], 2, nothing)  # packed a second time; one of the two is kept
        shutil.rmtree(late)
        with pytest.raises(FileNotFoundError):
            of_late.pack(job.encoder, [2], 2, nothing)
        with pytest.raises(FileNotFoundError):
            next(iter(PieceClaims(late, [2], 0, 1)))
        shutil.rmtree(soon)
        job.join_pieces(cut, 0)
    pack((x, y), tmp_path / "whole", shard_bytes=2000)
    assert content(folder) == content(tmp_path / "whole")


def test_statistics_use_samples_with_channels_of_first_sample(tmp_path):
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (1 + 2 * (i % 3 > 0), 8, 9), np.uint8) for i in range(90)]
    for i, image in enumerate(images):
        path = tmp_path / "in" / f"{i:02}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, image)
    pack(tmp_path / "in", tmp_path / "whole", shard_bytes=900)
    with open_pack_job(
        tmp_path / "in", tmp_path / "out", None, EncodingOptions(), PackOptions(900), nothing
    ) as job:
        cut = job.partition(2)
        run = job.work / "run-one"
        run.mkdir()
        PieceWriter(cut, job.work, run, 900, job.writer.images, job.writer.classes).pack(
            job.encoder, range(len(cut)), 2, nothing
        )
        shutil.rmtree(run)
        report = job.join_pieces(cut, 0)
    whole = Shards(tmp_path / "whole").meta.statistics
    assert report.meta.statistics["of"] == whole["of"] < 90
    assert report.meta.statistics["mean"] == pytest.approx(whole["mean"], rel=1e-12)
    assert report.meta.statistics["deviation"] == pytest.approx(whole["deviation"], rel=1e-12)


def test_statistics_of_no_samples_are_empty():
    none = Statistics.empty(False, (3,))
    assert none.as_json() == {}
    some = Statistics()
    some.merge(Statistics.from_state(False, none.as_state()))
    assert some.mean is None
