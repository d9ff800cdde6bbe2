"""Striping of packed datasets on Lustre, with artificial mounts and a recording lfs."""

import contextlib
import io
import shlex

import numpy as np
import pytest

from paceline.cli import app
from paceline.data.packing import striping
from paceline.security import overlay

LFS = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
  osts) echo OBDS:; for n in 0 1 2; do echo "$n: l-OST000${{n}}_UUID ACTIVE"; done
    echo "3: l-OST0003_UUID INACTIVE";;
  getstripe) {getstripe};;
  setstripe) {setstripe};;
esac
"""
PLAIN = "printf 'stripe_count:  {} stripe_size:   1048576 pattern: 0 stripe_offset: -1\\n'"
ON_ONE = PLAIN.format(1)
COMPOSITE = "printf '  lcm_layout_gen:    0\\n  stripe_count: 1\\n'"


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    """Make the folder /lustre of tmp_path a Lustre file system with three OSTs."""
    folder, tools = tmp_path / "lustre dir", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    mounts = tmp_path / "mounts"
    point = str(folder).replace(" ", "\\040")
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
        f"40 22 0:50 / {point} rw,flock - lustre 10.0.0.1@o2ib:/l rw\n"
    )
    monkeypatch.setattr(overlay, "MOUNTS", mounts)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    class Lustre:
        path = folder

        def set(self, getstripe=ON_ONE, setstripe="exit 0"):
            text = LFS.format(calls=tmp_path / "calls", getstripe=getstripe, setstripe=setstripe)
            (tools / "lfs").write_text(text)
            (tools / "lfs").chmod(0o755)

        def called(self):
            lines = (tmp_path / "calls").read_text().splitlines()
            return [line for line in lines if line.startswith("setstripe")]

    found = Lustre()
    found.set()
    return found


def pack(*words):
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        app(["pack", *map(str, words)])
    return int(end.value.code or 0), err.getvalue()


@pytest.fixture
def source(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.float32).reshape(20, 3))
    return tmp_path / "x.npy"


def test_striping_of_packed_set_is_proposed_with_its_command(lustre, source):
    dest = lustre.path / "packed"
    code, said = pack(source, dest)
    assert code == 0, said
    assert "is on Lustre, where each new file is on 1 of 3 storage targets" in said
    command = (
        f"mkdir -p {shlex.quote(str(dest))} && lfs setstripe -c 3 -S 4M {shlex.quote(str(dest))}"
    )
    assert f"HINT: --stripe 3, or before packing: {command}" in " ".join(said.split("\n"))
    assert lustre.called() == []


@pytest.mark.parametrize("getstripe", [PLAIN.format(4), PLAIN.format(-1), COMPOSITE, "exit 1"])
def test_nothing_is_proposed_if_files_are_striped_or_layout_is_unknown(lustre, source, getstripe):
    lustre.set(getstripe)
    assert striping.propose(lustre.path / "packed", None) == ""
    (lustre.path.parent / "bin/lfs").unlink()
    assert striping.propose(lustre.path / "packed", None) == ""


def test_nothing_is_proposed_elsewhere(lustre, source, tmp_path):
    assert "Lustre" not in pack(source, tmp_path / "packed")[1]


def test_stripe_option_sets_layout_before_shards_are_written(lustre, source):
    dest = lustre.path / "packed"
    lustre.set(setstripe='for last; do :; done; test -d "$last" && ls "$last" > ../content')
    with contextlib.chdir(lustre.path):
        code, said = pack(source, dest, "--stripe", "2")
    assert code == 0, said
    assert lustre.called() == [f"setstripe -c 2 -S 4M {dest}"]
    assert (lustre.path.parent / "content").read_text() == ""
    assert (dest / "paceline.json").exists()
    assert "HINT" not in said


@pytest.mark.parametrize(("value", "count"), [("all", "-1"), ("auto", "3"), ("7", "7")])
def test_values_of_stripe_option(lustre, value, count):
    striping.stripe(lustre.path / "set", striping.check_count(value), None)
    assert lustre.called() == [f"setstripe -c {count} -S 4M {lustre.path / 'set'}"]


@pytest.mark.parametrize(("to", "name"), [("hdf5", "x.h5"), ("tfrecord", "x")])
def test_unfinished_output_of_other_formats_gets_the_layout(lustre, source, to, name):
    pytest.importorskip("h5py")
    create = 'for last; do :; done; test -d "$last" || : > "$last"'
    lustre.set(setstripe=create)
    code, said = pack(source, lustre.path / name, "--to", to, "--stripe", "auto")
    assert code == 0, said
    assert lustre.called() == [f"setstripe -c 3 -S 4M {lustre.path / f'.{name}.part' / name}"]
    assert (lustre.path / name).stat().st_size > 0
    assert not list(lustre.path.glob(".*"))


def test_number_of_stripes_follows_format_and_storage_targets():
    many, few = striping.Layout(1, 100), striping.Layout(1, 2)
    unknown = striping.Layout(1, None)
    assert [striping.stripe_count(to, many) for to in (None, "webdataset", "lmdb")] == [4, 4, 16]
    assert striping.stripe_count("hdf5", few) == 2
    assert striping.stripe_count("hdf5", unknown) == 16


def test_mistakes_are_reported_before_anything_is_written(lustre, source, tmp_path):
    code, said = pack(source, tmp_path / "packed", "--stripe", "2")
    assert code == 2
    assert "is not on Lustre (file system: ext4). HINT: leave out --stripe" in said
    code, said = pack(source, lustre.path / "packed", "--stripe", "many")
    assert code == 2
    assert "--stripe must be a number of storage targets, all or auto; this is 'many'. HINT" in said
    lustre.set(setstripe="echo no such pool >&2; exit 2")
    code, said = pack(source, lustre.path / "packed", "--stripe", "2")
    assert code == 2
    assert "failed: no such pool. HINT: run the command yourself" in said
    assert not list(lustre.path.glob("**/*.json"))
