"""The machine file: exact round trips, and errors for invalid files."""

import dataclasses
import json
import math
import random
import re
import tomllib
import warnings
from pathlib import Path

import pytest
from machines import Maker, with_host

from paceline.cost.machine.machine_file import (
    UNLIMITED,
    Arithmetic,
    AtSize,
    Collective,
    Figure,
    Gpu,
    HostFacts,
    Limits,
    Machine,
    Memory,
    Network,
    Pair,
    Storage,
    as_json,
    load,
    save,
)
from paceline.cost.machine.toml_files import dumps
from paceline.security.text import printable


def again(machine, tmp_path):
    save(machine, tmp_path / "machine.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(tmp_path / "machine.toml")


@pytest.mark.parametrize("count", [1, 2, 16])
def test_machine_file_round_trip(tmp_path, count):
    machine = Maker(count).machine(count, gpus=count % 3)
    assert again(machine, tmp_path) == machine
    assert [p.name for p in tmp_path.iterdir()] == ["machine.toml"]


def test_minimal_machine_file_round_trip(tmp_path):
    bare = Machine("2026-01-31", (), unreachable={"host 1.x": 'said "no"\n\x07\x7f\\'})
    shown = {"host 1.x": 'said "no"\n\\x07\\x7f\\'}  # control characters are escaped
    assert again(bare, tmp_path) == Machine("2026-01-31", (), unreachable=shown)


def test_random_values_round_trip_exactly(tmp_path):
    draw = random.Random(7)
    odd = "".join(map(chr, [*range(1, 128), 0xE9, 0x2028, 0x1F6B2]))
    for _ in range(50):
        text = "".join(draw.choices(odd, k=draw.randrange(12)))
        assert tomllib.loads(dumps({text: text})) == {text: text}
        text = printable(text, lines=True)
        values = [math.ldexp(draw.random(), draw.randrange(-90, 90)) for _ in range(5)]
        machine = with_host(
            Maker().machine(2),
            "host1",
            versions={text: text, "a b": text, "": "x" * 120},
            networks=(Network(text, text, text),),
            clock_offset_s=-draw.random(),
            import_torch=Figure.of(values, "s"),
            limits=Limits(UNLIMITED, draw.randrange(1 << 62), None, 0),
            missing={"storage": text},
        )
        assert again(machine, tmp_path) == machine


def test_machine_file_is_human_readable(tmp_path):
    save(with_host(Maker().machine(2), "host0", limits=Limits(1024, UNLIMITED)), tmp_path / "m")
    text = (tmp_path / "m").read_text()
    assert text.startswith("version = 1\n")
    assert 'limits = { nofile = 1024, memlock_bytes = "unlimited" }' in text
    assert re.search(r"triad = { median = [\d.e+]+, low = .*, n = 5, unit = \"B/s\" }", text)


def test_toml_tables_lists_and_unusual_keys_are_written():
    tree = {
        "plain": 1,
        "a.b": {"inner": {"deep": [1.5, -2, True, "x"]}},
        "rows": [{"x": 1}, {"y": [{"z": 2}]}, {}],
        "none": {},
        "empty": [],
        "numbers": {"huge": 1e300, "tiny": 5e-324, "round": 1e16},
    }
    assert tomllib.loads(dumps(tree)) == tree


def test_figure_has_median_and_quartiles():
    figure = Figure.of([5.0, 1.0, 2.0, 4.0, 3.0], "s")
    assert figure == Figure(3.0, 2.0, 4.0, 5, "s")
    assert Figure.of([0.1] * 7, "s").spread == 0
    assert Figure.of([2], "s") == Figure(2.0, 2.0, 2.0, 1, "s")
    with pytest.raises(ValueError, match=r"no repetition was measured. HINT"):
        Figure.of([], "s")


def test_bandwidths_are_computed_from_time():
    size = AtSize(1000, Figure(2.0, 1.0, 4.0, 5, "s"))
    collective = Collective("in host", "all-reduce", 4, ("a",), sizes=(size,))
    assert size.algbw == Figure(500.0, 250.0, 1000.0, 5, "B/s")
    assert collective.busbw(size).median == pytest.approx(750)
    gathered = dataclasses.replace(collective, operation="all-gather")
    assert gathered.busbw(size).median == pytest.approx(375)
    told = dataclasses.replace(collective, operation="broadcast")
    assert told.busbw(size) == size.algbw


def test_json_has_all_keys_and_bandwidths():
    machine = with_host(Maker().machine(2), "host1", limits=Limits(nofile=UNLIMITED))
    told = json.loads(json.dumps(as_json(machine), allow_nan=False))
    assert told["version"] == 1
    assert told["hosts"][1]["limits"]["nofile"] == "unlimited"
    assert told["hosts"][1]["limits"]["memlock_bytes"] is None
    assert told["hosts"][0]["storage"][0]["write"]["unit"] == "B/s"
    size = told["collectives"][0]["sizes"][-1]
    assert size["algbw"]["median"] == pytest.approx(size["bytes"] / size["seconds"]["median"])
    assert set(told["hosts"][0]) == {f.name for f in dataclasses.fields(machine.hosts[0])}


GOOD = """
version = 1
made = "2026-01-31T12:00:00Z"
[[hosts]]
name = "a"
import_torch = { median = 2.0, low = 1.0, high = 3.0, n = 5, unit = "s" }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "version 1", r"is not TOML: .*line 2"),
        ("version = 1\n", "", r"version is missing"),
        ("version = 1", "version = 2", r"of version 2; this Paceline reads version 1"),
        ("version = 1", 'version = "1"', r"of version '1'"),
        ("made =", "mode =", r"made is missing"),
        ('"2026-01-31T12:00:00Z"', '"today"', r"made = 'today' is not a time such as"),
        ('name = "a"\n', "", r"hosts\[0\]\.name is missing"),
        ('name = "a"', "name = 7", r"hosts\[0\]\.name = 7 is not a text in quotes"),
        ("median = 2.0", 'median = "2"', r"hosts\[0\]\.import_torch\.median = '2' is not a number"),
        ("median = 2.0", "median = true", r"median = True is not a number"),
        ("low = 1.0", "low = -1.0", r"import_torch\.low = -1\.0 is negative"),
        ("high = 3.0", "high = nan", r"import_torch\.high = nan is not a finite number"),
        ("low = 1.0", "low = 2.5", r"import_torch: low = 2\.5, median = 2\.0.*not in order"),
        ("n = 5", "n = 5.5", r"import_torch\.n = 5\.5 is not a whole number"),
        ("n = 5", "n = 0", r"import_torch: n = 0, and a figure"),
        ('unit = "s"', 'unit = "ms"', r"import_torch\.unit = 'ms', and must be 's'"),
        ("[[hosts]]", "[hosts]", r"hosts = .* is not a list"),
        (
            'name = "a"',
            'name = "a"\nmask = "0-x"',
            r"hosts\[0\]: mask = '0-x' is not a list of cores",
        ),
        ('name = "a"', 'name = "a"\nversions = 3', r"hosts\[0\]\.versions = 3 is not a table"),
        ('name = "a"', 'name = "a"\n[[hosts]]\nname = "a"', r"'a' occurs 2 times"),
        (
            "[[hosts]]",
            '[[pairs]]\nfirst = "a"\nsecond = "b"\n[[hosts]]',
            r"pairs: 'b' is not one of the hosts",
        ),
    ],
)
def test_invalid_machine_file_is_rejected_by_key_and_value(tmp_path, old, new, message):
    path = tmp_path / "machine.toml"
    path.write_text(GOOD)
    load(path)
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "HINT" in str(caught.value)


def test_unreadable_files_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"can't be read: No such file.*HINT: paceline check"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load(tmp_path / "binary")


def test_unknown_keys_are_ignored_with_one_warning(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(GOOD.replace('name = "a"', 'name = "a"\ncolour = "red"') + "[more]\nx = 1\n")
    with pytest.warns(
        UserWarning, match=r"ignored unknown keys: hosts\[0\]\.colour, more"
    ) as caught:
        machine = load(path)
    assert len(caught) == 1
    assert machine.hosts[0].import_torch.median == 2.0


def test_missing_folder_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"can't be written: No such file.*HINT"):
        save(Maker().machine(1), tmp_path / "no" / "machine.toml")


def test_invalid_machine_is_not_written(tmp_path):
    wrong = with_host(Maker().machine(1), "host0", cores=-2)
    with pytest.raises(ValueError, match=r"hosts\[0\]\.cores = -2 is negative"):
        save(wrong, tmp_path / "machine.toml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "table",
    [
        *(Figure, Gpu, Network, Limits, Arithmetic, Memory, Storage, HostFacts, AtSize),
        *(Collective, Pair, Machine),
    ],
)
def test_machine_file_keys_are_documented(table):
    text = (Path(__file__).parents[2] / "docs/reference/formats/machine-file.md").read_text()
    code = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text))))
    assert {field.name for field in dataclasses.fields(table)} <= code


def test_documented_example_is_a_valid_machine_file(tmp_path):
    text = (Path(__file__).parents[2] / "docs/reference/formats/machine-file.md").read_text()
    (tmp_path / "machine.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    assert again(load(tmp_path / "machine.toml"), tmp_path).hosts[0].limits.nofile == 1 << 20
