"""What the bytes of a sample are is decided by their content, in every container."""

import io
import tarfile

import h5py
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from paceline.data import Files, Loader, Shards, pack
from paceline.data.sources.content import extension_of
from paceline.data.sources.formats import tfrecord

KINDS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG2000", "PPM")
GREY = 128


def encoded(kind, image=None, **options):
    out = io.BytesIO()
    (image or Image.new("RGB", (32, 24), (GREY, GREY, GREY))).save(out, kind, **options)
    return out.getvalue()


IMAGES = [encoded(kind) for kind in KINDS]


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def folder_of(path, contents):
    path = path / "in"
    path.mkdir()
    for k, content in enumerate(contents):
        (path / f"{k}.jpg").write_bytes(content)
    return path


def tar_of(path, contents):
    return write_tar(path / "x.tar", [(f"{k}.jpg", content) for k, content in enumerate(contents)])


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            one = tarfile.TarInfo(name)
            one.size = len(content)
            tar.addfile(one, io.BytesIO(content))
    return path


def lmdb_of(path, contents):
    return write_lmdb(path / "x.lmdb", {f"k{k}": content for k, content in enumerate(contents)})


def write_lmdb(path, values):
    pages = lmdb.open(str(path), subdir=False)
    with pages.begin(write=True) as view:
        for key, value in values.items():
            view.put(key.encode(), value)
    pages.close()
    return path


def parquet_of(path, contents):
    rows = [{"bytes": content, "path": None} for content in contents]
    return write_parquet(path / "x.parquet", {"image": rows})


def write_parquet(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def hdf5_of(path, contents):
    with h5py.File(path / "x.h5", "w") as file:
        x = file.create_dataset("x", len(contents), h5py.vlen_dtype(np.uint8))
        for k, content in enumerate(contents):
            x[k] = np.frombuffer(content, np.uint8)
    return path / "x.h5"


def tfrecord_of(path, contents):
    return write_tfrecord(path / "x.tfrecord", [{"image": content} for content in contents])


def write_tfrecord(path, examples):
    with path.open("wb") as file:
        for values in examples:
            example = tfrecord._example()()
            for name, value in values.items():
                feature = example.features.feature[name]
                if isinstance(value, bytes):
                    feature.bytes_list.value.append(value)
                else:
                    kind = feature.int64_list if isinstance(value[0], int) else feature.float_list
                    kind.value.extend(value)
            content = example.SerializeToString()
            head = len(content).to_bytes(8, "little")
            for part in (head, content):
                file.write(part + tfrecord.FOOTER.pack(tfrecord._masked_crc(part)))
    return path


def stream_of(path, contents):
    return iter(contents)


CONTAINERS = (folder_of, tar_of, lmdb_of, parquet_of, hdf5_of, tfrecord_of, stream_of)


@pytest.mark.parametrize("container", CONTAINERS)
def test_image_formats_are_recognised_in_every_container(tmp_path, container):
    """The names end with .jpg, or there are none."""
    report = pack(container(tmp_path, IMAGES), tmp_path / "one", resize=12)
    assert report.meta.packed["kind"] == "images"
    found = [Shards(tmp_path / "one")[i] for i in range(len(KINDS))]
    assert {one.shape for one in found} == {(12, 16, 3)}
    assert max(abs(one.astype(int) - GREY).max() for one in found) < 8


@pytest.mark.parametrize("container", CONTAINERS)
def test_sample_of_another_kind_is_named(tmp_path, container):
    with pytest.raises(ValueError, match=r"sample 2.*: is an array, but others are images\. HINT"):
        pack(container(tmp_path, [*IMAGES[:2], npy(np.zeros(3))]), tmp_path / "one")


def test_names_count_for_bytes_of_unknown_or_shared_signatures(tmp_path):
    assert extension_of(IMAGES[0], ".jpeg") == ".jpeg"
    assert extension_of(IMAGES[0], ".jfif") == ".jpg"
    assert extension_of(IMAGES[4], ".dng") == ".dng"  # a raw photo
    assert extension_of(b"P1 20 30\n", ".txt") == ".txt"
    assert extension_of(b"", ".png") == ".png"
    assert extension_of(b"BMW is a car") == ".bin"
    for name in ("a.jfif", "b.jfif", "c.gif"):
        (tmp_path / name).write_bytes(IMAGES[0])
    assert Files(tmp_path).images
    assert next(iter(Loader(Files(tmp_path), 3))).shape == (3, 3, 24, 32)


RAMP = np.linspace(0, 65535, 64 * 96).reshape(64, 96)


@pytest.mark.parametrize(
    ("kind", "mode", "stored", "dtype"),
    [
        ("PNG", "I;16", "<u2", "uint16"),
        ("TIFF", "I;16", "<u2", "uint16"),
        ("TIFF", "I;16B", ">u2", "uint16"),
        ("TIFF", "I", "<i4", "int32"),
        ("TIFF", "F", "<f4", "float32"),
        ("JPEG2000", "I;16", "<u2", "uint16"),
        ("PPM", "I", "<i4", "int32"),
    ],
)
def test_images_of_more_than_8_bits_keep_their_values(tmp_path, kind, mode, stored, dtype):
    image = Image.frombytes(mode, (96, 64), RAMP.astype(stored).tobytes())
    content = encoded(kind, image)
    report = pack([content], tmp_path / "one")
    array = Shards(tmp_path / "one")[0]
    assert array.dtype == dtype
    assert np.array_equal(array[..., 0], RAMP.astype(stored))
    assert report.meta.statistics["mean"] == pytest.approx([RAMP.astype(stored).mean()])
    with pytest.raises(ValueError, match=rf"has {dtype} values.*HINT: replace [^.]*; or leave"):
        pack([content], tmp_path / "small", resize=8)


def test_unsigned_32_bits_and_pages_of_tiffs(tmp_path):
    values = np.array([[0, 2**31 + 5, 2**32 - 1]], np.uint32)
    content = bytearray(encoded("TIFF", Image.fromarray(values.view("i4"))))
    entry = content.index(np.array([339, 3], "<u2").tobytes())  # SampleFormat
    content[entry + 8] = 1  # unsigned
    pack([bytes(content)], tmp_path / "one")
    assert np.array_equal(Shards(tmp_path / "one")[0][..., 0], values)
    pages = [Image.new("L", (4, 4))] * 3
    content = encoded("TIFF", pages[0], save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match=r"is a TIFF of 3 images, of which only the first would"):
        pack([content], tmp_path / "two")


def labels_of(folder):
    shards = Shards(folder)
    return {shards.name(i): shards[i][1] for i in range(len(shards))}


def csv_of(path, texts, heading=""):
    (path / "in").mkdir()
    for k in range(len(texts)):
        (path / "in" / f"{k}.png").write_bytes(IMAGES[1])
    lines = [heading] * bool(heading) + [f"{k}.png,{text}" for k, text in enumerate(texts)]
    (path / "labels.csv").write_text("\n".join(lines))
    return path / "in", path / "labels.csv"


def tar_with_labels(path, texts):
    parts = [((f"{k}.png", IMAGES[1]), (f"{k}.cls", t.encode())) for k, t in enumerate(texts)]
    return write_tar(path / "x.tar", [member for part in parts for member in part]), None


def lmdb_with_labels(path, texts):
    images = {f"image-{k}": IMAGES[1] for k in range(len(texts))}
    labels = {f"label-{k}": text.encode() for k, text in enumerate(texts)}
    count = {"num-samples": str(len(texts)).encode()}
    return write_lmdb(path / "x.lmdb", images | labels | count), None


@pytest.mark.parametrize("source", [csv_of, tar_with_labels, lmdb_with_labels])
@pytest.mark.parametrize(
    ("texts", "classes", "values"),
    [
        (["0", "+2", "-1"], [], [0, 2, -1]),
        (["1_0", "2_1", "1_0"], ["1_0", "2_1"], [0, 1, 0]),
        (["cat", "1e1", "nan", "inf"], ["1e1", "cat", "inf", "nan"], [1, 0, 3, 2]),
        (["0", "A", "0"], ["0", "A"], [0, 1, 0]),
        (["٣", "٤"], ["٣", "٤"], [0, 1]),
        (["inf", "nan"], ["inf", "nan"], [0, 1]),
        (["0.25", "1e1", "3"], [], [0.25, 10, 3]),
    ],
)
def test_text_labels_mean_the_same_in_every_source(tmp_path, source, texts, classes, values):
    path, table = source(tmp_path, texts)
    report = pack(path, tmp_path / "one", table)
    assert report.meta.classes == classes
    labels = labels_of(tmp_path / "one")
    assert [labels[name] for name in sorted(labels)] == values
    mixed = any("all labels are names of classes" in note for note in report.notes)
    assert mixed == ("cat" in texts or "A" in texts)


@pytest.mark.parametrize("source", [csv_of, tar_with_labels, lmdb_with_labels])
def test_labels_that_can_not_be_meant_are_errors(tmp_path, source):
    path, table = source(tmp_path, ["0.5", "O.7"])
    with pytest.raises(ValueError, match=r"the label 'O\.7' is a word, and '0\.5' a number\. HINT"):
        pack(path, tmp_path / "one", table)


def test_numbers_that_float32_changes_are_errors(tmp_path):
    for k, text in enumerate(("16777217,0", "1e39,0")):
        (tmp_path / str(k)).mkdir()
        folder, table = csv_of(tmp_path / str(k), [text])
        with pytest.raises(ValueError, match=r"sample 0\): its label '1.* does not fit into float"):
            pack(folder, tmp_path / "one", table)


def test_first_line_of_a_csv_is_a_heading_only_if_it_says_so(tmp_path):
    for heading in ("", "\ufefffile,label", "Image Path,x", "# o.png,0", "photo,class"):
        part = tmp_path / str(len(list(tmp_path.iterdir())))
        part.mkdir()
        folder, table = csv_of(part, ["0", "1"], heading)
        assert pack(folder, part / "one", table).meta.samples == 2
    for line, named in (("o.png,0", "o.png"), ("0.png;1", "0.png;1"), ("photo,3", "photo")):
        table.write_text(f"{line}\n1.png,1\n")
        with pytest.raises(ValueError, match=rf"names in line 1 the file {named}, .*begin it with"):
            pack(folder, tmp_path / "two", table)
    table.write_bytes(b"\xef\xbb\xbf0.png,0\n1.png,1")
    assert pack(folder, tmp_path / "three", table).meta.samples == 2


def test_tars_of_other_systems(tmp_path):
    png, tar = IMAGES[1], tmp_path / "x.tar"
    hidden = [("._0.png", b"\0\5\26\7"), ("a/.DS_Store", b"x"), ("./.git/0.cls", b"1")]
    whole = [("./0.png", png), ("./0.cls", b"0"), ("./1.png", png), ("./1.cls", b"1")]
    write_tar(tar, [*hidden, *whole])
    assert pack(tar, tmp_path / "one").meta.samples == 2
    for order in ((0, 2, 1, 3), (0, 1, 2, 0), (2, 0, 1, 3)):
        write_tar(tar, [whole[k] for k in order])
        hint = "contains ./0.png twice. HINT" if order[3] == 0 else r"write the tar with .*--sort="
        with pytest.raises(ValueError, match=hint):
            pack(tar, tmp_path / "two")
    write_tar(tar, [("x.png", png), ("x.cls", b"0"), ("x.png", png), ("x.cls", b"1")])
    with pytest.raises(ValueError, match=r"x\.tar contains x\.png twice\. HINT"):
        pack(tar, tmp_path / "two")


def test_keys_of_an_lmdb_that_are_no_samples(tmp_path):
    path = write_lmdb(
        tmp_path / "x.lmdb", {"length": b"2", "256-00": IMAGES[1], "256-01": IMAGES[0]}
    )
    report = pack(path, tmp_path / "one")
    assert (report.meta.samples, report.meta.packed["kind"]) == (2, "images")
    assert report.notes == ["the key length is left out: it is no sample"]


@pytest.mark.parametrize("later", [[0.7], [1, 2]])
def test_label_that_differs_from_the_first_is_an_error(tmp_path, later):
    examples = [{"image": IMAGES[0], "label": label} for label in ([1], later)]
    path = write_tfrecord(tmp_path / "x.tfrecord", examples)
    with pytest.raises(ValueError, match=r"sample 1: its label is (float32|int64) of"):
        pack(path, tmp_path / "one")
    members = [
        ("0.npy", npy(0)),
        ("0.y.npy", npy([1, 1])),
        ("1.npy", npy(0)),
        ("1.y.npy", npy([1, 0.7])),
    ]
    with pytest.raises(
        ValueError, match=r"1 \(sample 1\): its label is float64, but others are int"
    ):
        pack(write_tar(tmp_path / "x.tar", members), tmp_path / "one")


def test_stream_of_words_and_integers_as_labels_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"label of sample 1 is 0, but earlier labels are names of classes"
    ):
        pack([(np.zeros(3), "cat"), (np.zeros(3), 0)], tmp_path / "one")


def test_streams_of_pil_images_and_of_buffers(tmp_path):
    """An image with a palette is no array of indices, and a buffer of bytes no array of numbers."""
    picture = Image.new("RGB", (8, 6), "red").quantize()
    assert picture.mode == "P"
    pack([picture, Image.new("RGBA", (8, 6), "red")], tmp_path / "one")
    for k in range(2):
        assert np.array_equal(Shards(tmp_path / "one")[k][0, 0], [255, 0, 0])
    report = pack([memoryview(IMAGES[1]), bytearray(IMAGES[0])], tmp_path / "two")
    assert report.meta.packed["kind"] == "images"


def test_numbers_as_extensions(tmp_path):
    """More kinds of names than are looked into when the folder is opened."""
    for k in range(20):
        (tmp_path / f"image.{k:03}").write_bytes(IMAGES[0])
    assert Files(tmp_path).images
    (tmp_path / "image.999").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"image\.999 .* but others are images"):
        pack(tmp_path, tmp_path.with_name("one"))
