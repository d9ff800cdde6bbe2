"""Settings files: entries that are applied, and entries that are ignored with a note."""

import tomllib

import pytest

from paceline.knobs.settings import Setting, settings_for_script, write_settings

HEAD = 'format = "paceline-settings"\nversion = 1\n'


def file(folder, text):
    path = folder / "settings.toml"
    path.write_text(text)
    return path


def test_written_settings_are_read_and_reasons_are_comments(tmp_path):
    path = tmp_path / "fast.toml"
    why = ("input-waiting: 40.0 % of a step's time", "measured +60 % (55 to 65)")
    made = {"script": "train.py", "ranks": 2}
    write_settings(path, {"loader-workers": Setting(4, why), "gradient-views": Setting(True)}, made)
    knobs, notes = settings_for_script(path, "some/where/train.py")
    assert knobs == {"loader-workers": 4, "gradient-views": True}
    assert notes == []
    assert "# input-waiting: 40.0 % of a step's time\n# measured" in path.read_text()
    assert tomllib.loads(path.read_text())["made"] == made


def test_invalid_settings_are_ignored_and_reported(tmp_path):
    path = file(
        tmp_path,
        HEAD + '[knobs]\nloader-workers = 2\nwarp = 9\nthreads = "many"\nbucket-mb = true\n'
        "gradient-views = false\nfloat32 = true\nprefetch = 1000\n",
    )
    knobs, notes = settings_for_script(path, "train.py")
    assert knobs == {"loader-workers": 2}
    assert len(notes) == 6
    said = "\n".join(notes)
    assert (
        "warp = 9 is ignored: there is no knob of this name. HINT: use one of loader-workers, "
        in said
    )
    assert "threads = 'many' is ignored: the value must be a whole number from 1 to 1024" in said
    assert "gradient-views = False is ignored: the value must be true" in said
    assert "float32 = True is ignored: this remedy needs an edit of the script" in said
    assert "prefetch = 1000 is ignored: the value must be a whole number from 1 to 64" in said


def test_settings_of_different_script_or_torch_are_reported(tmp_path):
    path = file(tmp_path, HEAD + '[knobs]\nthreads = 2\n[made]\nscript = "other.py"\n')
    knobs, (note,) = settings_for_script(path, "train.py")
    assert knobs == {}
    assert "was made for other.py, not for train.py, and is ignored. HINT:" in note
    path = file(tmp_path, HEAD + '[knobs]\nthreads = 2\n[made]\ntorch = "1.0"\n')
    knobs, (note,) = settings_for_script(path, "train.py")
    assert knobs == {"threads": 2}
    assert "was made with torch 1.0, and this is" in note


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("threads = 2\n", "is not a settings file: format ="),
        (
            'format = "paceline-settings"\nversion = 99\n',
            "has version 99, and this Paceline reads 1",
        ),
        ("x = = 3", "is not TOML: Invalid value"),
        (
            HEAD + "[knobs]\ncompress-bf16 = true\ncompress-fp16 = true\n",
            "exclude each other. HINT",
        ),
    ],
)
def test_invalid_settings_file_is_rejected(tmp_path, text, said):
    with pytest.raises(ValueError, match=r"HINT|TOML") as error:
        settings_for_script(file(tmp_path, text), "train.py")
    assert said in str(error.value)


def test_missing_settings_file_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"No such file or directory\. HINT"):
        settings_for_script(tmp_path / "none.toml", "train.py")
