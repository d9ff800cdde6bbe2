"""paceline pack: round trips of every kind of input, also after any number of kills."""

import json
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import ranks
import sets
from PIL import Image

from paceline.data import DataError, Loader, Shards, pack
from paceline.data.format.decode import import_simplejpeg
from paceline.data.packing import encoder_threads, statistics
from paceline.data.sources import folder_source as folder_source


def command(*words, cwd=None, check=True):
    done = subprocess.run(
        [ranks.PACELINE, "pack", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=ranks.environment(COLUMNS="200"),
    )
    if check and done.returncode:
        raise AssertionError(f"{done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def samples(folder):
    shards = Shards(folder)
    return [shards[i] for i in range(len(shards))]


def test_image_class_folders_round_trip(tmp_path):
    folder = sets.images(tmp_path / "in")
    done = command(folder, tmp_path / "out", "--json")
    told = json.loads(done.stdout)
    assert told["samples"] == 30
    assert told["classes"] == list(sets.CLASSES)
    assert told["statistics"]["classes"] == {"0": 10, "1": 10, "2": 10}
    shards = Shards(tmp_path / "out")
    assert sorted(shards.name(i) for i in range(30)) == sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*.*")
    )
    pixels = []
    for i in range(30):
        image, label = shards[i]
        path = folder / shards.name(i)
        assert sets.CLASSES[label] == path.parent.name
        assert image.shape == (20, 24, 3)
        data = path.read_bytes()
        if path.suffix == ".jpg":
            assert np.array_equal(image, import_simplejpeg().decode_jpeg(data))
        assert np.abs(image.astype(int) - np.asarray(Image.open(path))).mean() < 2
        pixels.append(image.reshape(-1, 3))
    mean = np.concatenate(pixels).mean(0)
    assert told["statistics"]["of"] == 30
    assert told["statistics"]["mean"] == pytest.approx(mean.tolist(), rel=1e-9)
    deviation = np.concatenate(pixels).std(0)
    assert told["statistics"]["deviation"] == pytest.approx(deviation.tolist(), rel=1e-9)


def test_samples_are_shuffled_by_seed(tmp_path):
    x, y = sets.arrays(100)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack(x, tmp_path / name, y, seed=seed)
    order = [int(array.flat[0]) for array, _ in samples(tmp_path / "a")]
    assert sorted(order) == list(range(100))
    assert order != list(range(100))
    assert sets.contents(tmp_path / "a") == sets.contents(tmp_path / "b")
    assert sets.contents(tmp_path / "a") != sets.contents(tmp_path / "c")


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 2, 2, 2, 3)])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64", "complex64"])
@pytest.mark.parametrize("compress", [False, True])
def test_npy_files_round_trip_bit_identical(tmp_path, shape, dtype, compress):
    x, _ = sets.arrays(20, shape, "float64")
    x = x.astype(dtype)
    y = np.random.default_rng(1).normal(size=(20, 3)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    report = pack(tmp_path / "x.npy", tmp_path / "out", tmp_path / "y.npy", compress=compress)
    assert report.meta.array.shape == shape
    order = np.random.default_rng(0).permutation(20)
    for i, (array, label) in enumerate(samples(tmp_path / "out")):
        assert array.dtype == dtype
        assert array.tobytes() == x[order[i]].tobytes()
        assert np.array_equal(label, y[order[i]])


def test_labels_from_csv_table(tmp_path):
    folder = sets.images(tmp_path / "in", 12)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))
    words = tmp_path / "words.csv"
    words.write_text("file,what\n" + "".join(f"{f},{'xyz'[i % 3]}\n" for i, f in enumerate(files)))
    report = pack(folder, tmp_path / "words", words)
    assert report.meta.classes == ["x", "y", "z"]
    shards = Shards(tmp_path / "words")
    for i in range(12):
        assert shards[i][1] == files.index(shards.name(i)) % 3
    numbers = tmp_path / "numbers.csv"
    numbers.write_text("".join(f"{f},{i},{i / 2}\n" for i, f in enumerate(files[:9])))
    report = pack(folder, tmp_path / "numbers", numbers)
    assert report.notes == [f"3 files of {folder} have no line in the CSV and are left out"]
    shards = Shards(tmp_path / "numbers")
    for i in range(9):
        assert shards[i][1].tolist() == [
            files.index(shards.name(i)),
            files.index(shards.name(i)) / 2,
        ]


def test_missing_label_is_reported(tmp_path):
    folder = sets.images(tmp_path / "in", 3)
    table = tmp_path / "labels.csv"
    table.write_text("ant/0000.jpg,1\nbee/0001.jpg,\n")
    done = command(folder, tmp_path / "out", "--labels", table, check=False)
    assert done.returncode == 2
    assert f"{table} has no label for bee/0001.jpg (line 2)" in done.stderr
    assert "HINT" in done.stderr


def test_stream_is_shuffled(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\ndef samples():\n    for i in range(100):\n"
        "        yield np.full(3, i, 'int16'), 'even' if i % 2 == 0 else 'odd'\n"
    )
    told = json.loads(command("mine:samples", tmp_path / "out", "--json", cwd=tmp_path).stdout)
    assert told["classes"] == ["even", "odd"]
    found = samples(tmp_path / "out")
    order = [int(array[0]) for array, _ in found]
    assert sorted(order) == list(range(100)) != order
    assert all(int(array[0]) % 2 == label for array, label in found)
    assert not (tmp_path / "out" / ".packing").exists()


def test_uint8_arrays_with_channels_last_are_images(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (20, 9, 8, 3), dtype=np.uint8)
    pack(x, tmp_path / "arrays")
    pack(iter(x), tmp_path / "stream")
    for name in ("arrays", "stream"):
        shards = Shards(tmp_path / name)
        assert shards.images
        assert shards.meta.statistics["mean"] == pytest.approx(x.mean((0, 1, 2)).tolist())
        assert next(iter(Loader(shards, 4))).shape == (4, 3, 9, 8)
    pack(np.moveaxis(x, 3, 1), tmp_path / "first")
    assert not Shards(tmp_path / "first").images


def test_images_are_resized_or_decoded(tmp_path):
    folder = sets.images(tmp_path / "in", 12, (60, 90))
    pack(folder, tmp_path / "small", resize=30)
    assert {array.shape for array, _ in samples(tmp_path / "small")} == {(30, 45, 3)}
    pack(tmp_path / "small", tmp_path / "arrays", decode=True)
    decoded = Shards(tmp_path / "arrays")
    assert decoded.images
    assert decoded.meta.array.shape == (30, 45, 3)
    small = {str(a.tobytes()) for a, _ in samples(tmp_path / "small")}
    assert {str(a.tobytes()) for a, _ in samples(tmp_path / "arrays")} == small


APPLIED = """
import numpy as np

def planes(x):
    return np.moveaxis(x, -1, 0).astype(np.float32) / 255

def broken(x):
    return x[5, 99]
"""


def test_apply_runs_function_once_at_packing(tmp_path):
    folder = sets.images(tmp_path / "in", 12)
    (tmp_path / "mine.py").write_text(APPLIED)
    command(folder, tmp_path / "plain", cwd=tmp_path)
    command(folder, "applied", "--apply", "mine:planes", cwd=tmp_path)
    for (image, label), (planes, other) in zip(
        samples(tmp_path / "plain"), samples(tmp_path / "applied"), strict=True
    ):
        assert np.array_equal(planes, np.moveaxis(image, -1, 0).astype(np.float32) / 255)
        assert label == other
    x, _ = next(iter(Loader(tmp_path / "applied", 4)))
    assert x.shape == (4, 3, 20, 24)
    meta = Shards(tmp_path / "applied").meta
    assert (meta.packed["kind"], meta.packed["encoding"]["apply"]) == ("arrays", "mine:planes")
    done = command(folder, "broken", "--apply", "mine:broken", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "apply mine:broken: IndexError" in done.stderr
    done = command(folder, "both", "--apply", "mine:planes", "--decode", cwd=tmp_path, check=False)
    assert "HINT: leave out --decode and --resize" in done.stderr


def test_overflowing_cast_is_rejected(tmp_path):
    x = np.array([[1.0], [300.0]])
    with pytest.raises(ValueError, match=r"has values from 300.0 to 300.0, which uint8 can't hold"):
        pack(x, tmp_path / "out", cast="uint8")
    pack(x, tmp_path / "out", cast="float16", fresh=True)
    assert {array.dtype.name for array in samples(tmp_path / "out")} == {"float16"}


def test_packed_bytes_are_independent_of_thread_count(tmp_path):
    folder = sets.images(tmp_path / "in", 60)
    for workers in (1, 5):
        pack(folder, tmp_path / f"out{workers}", workers=workers, shard_bytes=4000)
    assert len(Shards(tmp_path / "out1").meta.shards) > 3
    assert sets.contents(tmp_path / "out1") == sets.contents(tmp_path / "out5")


@pytest.mark.parametrize("little_s", [0.0, 1e9], ids=["threads", "alone"])
def test_packed_bytes_are_independent_of_reading_method(tmp_path, monkeypatch, little_s):
    folder = sets.images(tmp_path / "in", count=300)
    pack(folder, tmp_path / "a", shard_bytes=20_000)
    monkeypatch.setattr(encoder_threads, "MAX_CPU_S_WITHOUT_THREADS", little_s)
    monkeypatch.setattr(folder_source, "MAX_LISTING_BYTES_IN_MEMORY", 0)
    pack(folder, tmp_path / "b", shard_bytes=20_000)
    assert len(Shards(tmp_path / "a").meta.shards) > 5
    assert sets.contents(tmp_path / "a") == sets.contents(tmp_path / "b")
    told = [Shards(tmp_path / name).meta for name in ("a", "b")]
    assert told[0].statistics == told[1].statistics
    assert told[0].shards == told[1].shards


def test_stream_may_reuse_its_buffer(tmp_path):
    def given():
        array, data = np.zeros(1000), bytearray(8000)
        for i in range(50):
            array[:], data[:] = i, bytes([i]) * 8000
            yield (array if kind == "arrays" else data), i

    for kind in ("arrays", "files"):
        pack(given(), tmp_path / kind)
        for data, label in samples(tmp_path / kind):
            assert set(data) == {label}


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_image_moments_match_numpy(monkeypatch, channels):
    image = np.random.default_rng(0).integers(0, 256, (30, 41, channels), np.uint8)
    by_pillow = statistics._image_moments(image)
    monkeypatch.setattr(statistics, "find_spec", lambda name: None)
    for one, other in zip(by_pillow, statistics._image_moments(image), strict=True):
        assert np.array_equal(one, other)


def test_killed_packing_resumes_with_identical_bytes(tmp_path):
    folder = sets.images(tmp_path / "in", 300)
    pack(folder, tmp_path / "whole", shard_bytes=6000)
    killer = (
        "import os, signal, sys\nfrom paceline.data import pack\n"
        "def step(done, size):\n    if done == int(sys.argv[3]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "pack(sys.argv[1], sys.argv[2], shard_bytes=6000, step=step)\n"
    )
    for at in (90, 170, 171):
        killed = subprocess.run([sys.executable, "-c", killer, folder, tmp_path / "out", str(at)])
        assert killed.returncode == -signal.SIGKILL
        with pytest.raises(DataError, match="is not packed completely"):
            Shards(tmp_path / "out")
    report = pack(folder, tmp_path / "out", shard_bytes=6000)
    assert report.went_on_at > 100
    assert sets.contents(tmp_path / "out") == sets.contents(tmp_path / "whole")
    told = [json.loads((tmp_path / n / "paceline.json").read_text()) for n in ("out", "whole")]
    for one in told:
        del one["checksum"], one["packed"]["date"]
    assert told[0] == told[1]


def test_interrupt_is_reported_with_exit_code_130(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import time\nimport numpy as np\n\ndef samples():\n    for i in range(10**9):\n"
        "        time.sleep(0.001)\n        yield np.zeros(8)\n"
    )
    job = subprocess.Popen(
        [ranks.PACELINE, "pack", "mine:samples", "out"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=ranks.environment(),
    )
    ranks.wait_until(lambda: (tmp_path / "out" / ".packing" / "spool" / ".packing").exists())
    job.send_signal(signal.SIGINT)
    assert "interrupted" in job.communicate(timeout=30)[1]
    assert job.returncode == 130


def test_unreadable_file_raises_or_is_skipped(tmp_path):
    folder = sets.images(tmp_path / "in", 30)
    (folder / "bee" / "0004.jpg").write_bytes(b"no image at all")
    (folder / "cat" / "0005.jpg").unlink()
    (folder / "cat" / "0005.jpg").symlink_to("nowhere")
    done = command(folder, tmp_path / "out", check=False)
    assert done.returncode == 2
    assert "HINT: repair the sample and repeat the same command" in done.stderr
    done = command(folder, tmp_path / "out", "--on-error", "skip")
    assert "2 samples were left out" in done.stdout
    assert "cat/0005.jpg (sample" in done.stdout
    assert "no longer exists" in done.stdout
    assert len(Shards(tmp_path / "out")) == 28


def test_invalid_streams_and_options_are_reported(tmp_path):
    def fails(told, stream, **options):
        with pytest.raises(ValueError, match=told):
            pack(stream, tmp_path / "out", **options)

    x, image = np.zeros(3), np.zeros((8, 8, 3), np.uint8)
    fails(r"^list yields no samples", [])
    fails(r"^list: sample 1: is an image, but others are arrays\. HINT: pack each", [x, image])
    fails(r"^list: sample 1: is an image, but others are arrays", [x, b"\xff\xd8\xff"])
    fails(r"^list: sample 0: .*JPEG", [b"\xff\xd8\xff"])
    fails(r"^list: sample 1: .* not numeric", [x, np.zeros(3, "datetime64[s]")])
    fails(r"resize \(--resize\) must be at least 1 pixel; this is 0\. HINT", [x], resize=0)
    fails(r"quality \(--quality\) must be from 1 to 100; this is 0\. HINT", [x], quality=0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", "out"], "nowhere: the file or folder does not exist"),
        (["empty", "out"], "empty contains no files to pack"),
        (["mixed", "out"], "files of several kinds: a.npy (arrays), b.jpg (images)"),
        (["no:such", "out"], "no:such can't be imported: No module named 'no'"),
        (["bad.npy", "out"], "bad.npy: can't be read as a .npy file"),
        (["x.npy", "out", "--labels", "y.npy"], "x.npy has 5 samples, but y.npy has 4 labels"),
        (["x.npy", "done"], "done contains a packed dataset"),
        (
            ["x.npy", "out", "--cast", "float7"],
            "complex128; this is 'float7'. HINT: --cast float16",
        ),
        (["x.npy", "out", "--cast", "datetime64[s]"], "; this is 'datetime64[s]'. HINT: --cast"),
        (["x.npy", "out", "--shard-size", "big"], "--shard-size must be a size; this is 'big'"),
        (["x.npy"], "the destination folder is missing. HINT: paceline pack SOURCE DEST"),
        (["--check", "empty"], "empty: has no paceline.json"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(tmp_path, words, told):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "b.jpg").write_bytes(b"")
    (tmp_path / "mixed" / "a.npy").write_bytes(b"")
    (tmp_path / "bad.npy").write_bytes(b"no array")
    np.save(tmp_path / "x.npy", np.zeros((5, 2)))
    np.save(tmp_path / "y.npy", np.zeros(4))
    pack(np.zeros((3, 2)), tmp_path / "done")
    done = command(*words, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_resuming_with_another_source_is_rejected(tmp_path):
    def stop(done, size):
        if done == 50:
            raise KeyboardInterrupt

    x, _ = sets.arrays(100)
    with pytest.raises(KeyboardInterrupt):
        pack(x, tmp_path / "out", seed=3, shard_bytes=500, step=stop)
    with pytest.raises(ValueError, match="with other values of seed, source"):
        pack(x[:4], tmp_path / "out", seed=4, shard_bytes=500)
    assert pack(x, tmp_path / "out", seed=3, shard_bytes=500).went_on_at > 30
    assert pack(x[:4], tmp_path / "out", fresh=True).meta.samples == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("index.bin", "paceline.json", "shard-00000.bin"),
    ]


def test_failed_packing_leaves_no_files(tmp_path):
    with pytest.raises(ValueError, match="none of 0 samples"):
        pack(np.zeros((0, 2)), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_symlinks_are_followed_without_cycles(tmp_path):
    folder = sets.images(tmp_path / "in", 9)
    (tmp_path / "elsewhere").mkdir()
    (folder / "ant").rename(tmp_path / "elsewhere" / "ant")
    (folder / "ant").symlink_to(tmp_path / "elsewhere" / "ant")
    (folder / "bee" / "up").symlink_to(folder)
    report = pack(folder, tmp_path / "out", follow_links=True)
    assert report.meta.samples == 9
    assert report.meta.classes == ["ant", "bee", "cat"]


def test_packing_resumes_after_full_disk(tmp_path):
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        x = np.random.default_rng(0).normal(size=(400, 512))
        with pytest.raises(ValueError, match=r"No space left on device\. Complete shards are kept"):
            pack(x, disk / "out", shard_bytes=200_000)
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        report = pack(x, disk / "out", shard_bytes=200_000)
        assert report.went_on_at > 0
        assert {a.tobytes() for a in samples(disk / "out")} == {row.tobytes() for row in x}
    finally:
        subprocess.run(["umount", disk], check=True)


def test_concurrent_packing_into_one_folder_is_rejected(tmp_path):
    (tmp_path / "out" / ".packing").mkdir(parents=True)
    program = (
        "import fcntl, sys, time\nfile = open(sys.argv[1], 'a')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    lock = str(tmp_path / "out" / ".packing" / "lock")
    with subprocess.Popen(
        [sys.executable, "-c", program, lock], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match="is being packed by another process"):
                pack(np.zeros((4, 2)), tmp_path / "out")
        finally:
            other.kill()


def test_check_finds_corrupted_sample(tmp_path):
    folder = sets.images(tmp_path / "in", 40)
    pack(folder, tmp_path / "out")
    done = command("--check", tmp_path / "out")
    assert "40 samples" in done.stdout
    assert "all samples are unchanged" in done.stdout
    shard = tmp_path / "out" / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    row = Shards(tmp_path / "out").row(7)
    data[row.offset + 5] ^= 4
    shard.write_bytes(data)
    done = command("--check", tmp_path / "out", check=False)
    assert done.returncode == 1
    assert f"sample 7 at byte {row.offset:,}: a byte has changed" in done.stdout
    assert json.loads(command("--check", tmp_path / "out", "--json", check=False).stdout)["bad"]


def test_packing_memory_is_bounded(tmp_path):
    """Packing 200 MiB of arrays raises the peak resident memory by less than 150 MiB."""
    program = (
        "import resource, sys, numpy as np\nfrom paceline.data import pack\n"
        "def samples():\n    for i in range(200):\n        yield np.full(1 << 17, i, 'float64')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "pack(samples(), sys.argv[1], workers=2)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 150
    assert len(Shards(tmp_path / "out")) == 200


def test_packing_does_not_import_torch():
    code = "import sys, paceline.data.packing.pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("value", "source", "cast", "reason"),
    [
        (1e6, "float64", "float16", r"1000000\.0, which float16 can't hold"),
        (1e39, "float64", "float32", r"1e\+39, which float32 can't hold"),
        (70000, "int32", "float16", "70000, which float16 can't hold"),
        (np.nan, "float32", "uint8", "nan, which uint8 can't hold"),
        (np.inf, "float32", "int64", "inf, which int64 can't hold"),
        (2.0**63, "float64", "int64", r"9\.2\S+e\+18, which int64 can't hold"),
        (1 + 2j, "complex128", "float32", r"\(1\+2j\), which float32 can't hold"),
        (1e300, "complex128", "complex64", r"\(1e\+300\+0j\), which complex64 can't hold"),
    ],
)
def test_cast_that_loses_a_value_names_sample_and_value(tmp_path, value, source, cast, reason):
    x = np.ones((9, 4, 5), source)
    x[7, 2, 3] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=rf"sample 7.* {reason}.*HINT: .*--cast"):
            pack(x, tmp_path / "out", cast=cast)
        pack(x[:7], tmp_path / "whole", cast=cast)
        if np.dtype(cast).kind in "fc":  # these values exist in the new dtype
            pack(np.array([[np.nan, np.inf]]), tmp_path / "kept", cast=cast, statistics=0)
