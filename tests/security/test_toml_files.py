"""Machine files, settings and stored predictions from an attacker."""

import json
import os
import time

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.comm.tune.choice import ExchangeSettings
from paceline.comm.tune.saved_settings import load_settings
from paceline.cost.machine.machine_file import Figure, HostFacts, Machine, load, save
from paceline.cost.machine.toml_files import read_toml
from paceline.knobs.settings import read, settings_for_script
from paceline.security.files import InvalidFileError
from paceline.study.diagnose.diagnose import (
    PredictedGain,
    prediction_errors,
    predictions_file,
    store_predictions,
)

SETTINGS = 'format = "paceline-settings"\nversion = 1\n'
MACHINE = 'version = 1\nmade = "2026-01-31"\n'


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000,
        "x = " + "9" * 5000,
        "x = 0x" + "f" * 5000,
        "x = [[[9223372036854775808]]]",
        ".".join("a" * 100_000) + " = 1",
        "x = { " + " . ".join("a" * 100_000) + " = 1 }",
        "[" + ".".join(['"b"'] * 50_000) + "]",
        "x = = 1",
        "\ufffe\x00",
    ],
    ids=lambda text: text[:12],
)
def test_slow_or_deeply_nested_toml_is_rejected_quickly(tmp_path, text):
    path = tmp_path / "a.toml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(InvalidFileError, match=r"a\.toml: "):
        read_toml(path, 1 << 20)
    assert time.monotonic() - began < 1


def test_toml_strings_are_printable_and_fifos_rejected(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('"\\u001b[2J" = "\\u009b"\nversion = "1.2.3"\nx.y = 1\n')
    assert read_toml(path, 100) == {"\\x1b[2J": "\\x9b", "version": "1.2.3", "x": {"y": 1}}
    with pytest.raises(InvalidFileError, match="more than the limit of 10"):
        read_toml(path, 10)
    os.mkfifo(tmp_path / "pipe")
    for reader in (load, read):
        with pytest.raises(ValueError, match=r"pipe.*no regular file.*HINT"):
            reader(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[hosts]]\nname = "a"\nmask = "0-99999999999"\n', "mask = "),
        ('[[hosts]]\nname = "a"\nsockets = 1e400\n', "not a whole number"),
        ('[[hosts]]\nname = "a"\nclock_offset_s = 1e300\n', "is not from 1e-30 to 1e"),
        ('[[hosts]]\nname = "a"\nclock_offset_s = nan\n', "not a finite number"),
        ('[[hosts]]\nname = "a"\nsockets = 0x7fffffffffffffffff\n', "does not fit 64 bits"),
        ('[[collectives]]\ngroup = "all"\noperation = "x"\nranks = 0\nhosts = []\n', "less"),
        ('hosts = 1\n', "not a list"),
        ('hosts = ["\\u001b[2J"]\n', "not a table"),
    ],
)  # fmt: skip
def test_machine_file_with_wrong_values_reports_the_key(tmp_path, text, said):
    path = tmp_path / "machine.toml"
    path.write_text(MACHINE + ("hosts = []\n" if "collectives" in text else "") + text)
    with pytest.raises(InvalidFileError, match=said) as refused:
        load(path)
    assert str(refused.value).isprintable()


def test_machine_figure_of_zero_is_drawn(tmp_path):
    zero = Figure(0.0, 0.0, 0.0, 3, "s")
    save(Machine("2026-01-31", (HostFacts("a", import_torch=zero),)), tmp_path / "m.toml")
    file = str(tmp_path / "m.toml")
    done = CliRunner().invoke(app, ["check", "--compare", file, file])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "text",
    [
        "knobs = 1",
        "made = [1]",
        "[made]\nscript = [1]\n",
        "[made]\nscript = 1979-05-27\n",
        "[knobs]\n" + "".join(f"k{i} = 1\n" for i in range(300)),
    ],
    ids=lambda text: text[:20],
)
def test_settings_of_wrong_types_are_rejected(tmp_path, text):
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS + text)
    with pytest.raises(InvalidFileError, match=r"settings\.toml: does not match its format"):
        settings_for_script(path, "train.py")
    for version in ("-1", "0", "true"):
        path.write_text(f'format = "paceline-settings"\nversion = {version}\n')
        with pytest.raises(InvalidFileError):
            read(path)


@pytest.mark.parametrize(
    "knobs", ['bucket-mb = "\\u001b[2J"', "bucket-mb = inf", 'algorithm = "x"', "compress-bf16 = 1"]
)
def test_tuner_ignores_invalid_settings(tmp_path, knobs):
    path = tmp_path / "kept.toml"
    path.write_text(f'{SETTINGS}[knobs]\n{knobs}\n[made]\nby = "--tune-exchange"\nranks = 2\n')
    choice, why = load_settings(path, {"ranks": 2}, ExchangeSettings())
    assert choice is None
    assert "is ignored" in why
    assert why.isprintable()


def test_invalid_stored_predictions_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pair = PredictedGain("2026", "train.py", "threads", "ladder", 0.1, 0.0, 0.2, 0.3)
    assert store_predictions([pair] * 3) == ""
    good = vars(pair)
    with predictions_file().open("a") as file:
        for bad in ("[" * 5000, "{", "[1]", "5", json.dumps(good | {"measured": "x"})):
            file.write(bad + "\n")
        file.write(json.dumps(good | {"predicted": float("inf")}) + "\n")
        file.write(json.dumps(good | {"source": [1]}) + "\n")
    (found,) = prediction_errors().values()
    assert (found.count, round(found.points)) == (3, 20)
    predictions_file().unlink()
    os.mkfifo(predictions_file())
    assert prediction_errors() == {}
    assert "are not remembered" in store_predictions([pair])
