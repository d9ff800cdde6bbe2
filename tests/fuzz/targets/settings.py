"""Settings files: the settings that paceline run and the tuner read from one."""

from collections.abc import Iterator

from fuzz.scratch import new_folder
from paceline.comm.tune import saved_settings
from paceline.comm.tune.choice import ExchangeSettings
from paceline.knobs import settings
from paceline.knobs.registry import KNOBS
from paceline.knobs.tuning import made

FILE = new_folder() / "settings.toml"
settings._other_torch = lambda *_: []  # type: ignore[assignment]  # it would read package metadata
MINE = {"ranks": 2, "sockets": False, "torch": "2.8"}
HEAD = 'format = "paceline-settings"\nversion = 1\n[knobs]\n'


def seeds() -> Iterator[bytes]:
    names = {name: knob.value for name, knob in KNOBS.items()}
    yield (HEAD + "".join(f"{name} = 4\n" for name in names)).encode()
    yield (HEAD + "".join(f"{name} = true\n" for name in names)).encode()
    yield (HEAD + 'exchange = "gloo"\nbucket-mb = 12.5\nalgorithm = "ring"\n').encode()
    told = '[made]\nby = "--tune-exchange"\nscript = "train.py"\nranks = 2\nsockets = false\n'
    yield (HEAD + 'exchange = "paceline"\nbucket-mb = 4\n' + told + 'torch = "2.8"\n').encode()
    yield (HEAD + "x.y.z = 0xffffffffffffffffffff\nn = [nan, inf, 1979-05-27]\n").encode()


def run(data: bytes) -> None:
    FILE.write_bytes(data)
    try:
        knobs, notes = settings.settings_for_script(FILE, "train.py")
        assert all(KNOBS[name].value.fits(value) for name, value in knobs.items())  # type: ignore[union-attr]
        assert all(note.isprintable() for note in notes), notes
    except ValueError:
        pass
    tree = settings.read(FILE)
    assert made(FILE, tree)["by"] == "--tune-exchange"
    choice, why = saved_settings.load_settings(FILE, MINE, ExchangeSettings())
    assert f"{choice}{why}".isprintable()
