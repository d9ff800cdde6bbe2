"""Settings files: the knobs to set, the reason for each, and its measured gain.

A settings file is TOML with the keys ``format`` and ``version``, a table ``knobs`` (name = value,
with comments), a table ``made``, which names the script and the machine of the measurements, and a
table ``verify`` with the differences that ``paceline verify`` accepts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from ..cost.machine.dataclass_tree import shorten
from ..cost.machine.toml_files import dumps, read_toml
from ..security.files import InvalidFileError, error_reason
from ..security.outputs import write_output
from ..security.schema import check
from .registry import KNOBS

FORMAT, VERSION = "paceline-settings", 1
MAX_BYTES = 1 << 20
MAX_KNOBS = 256


class VerifyTable(TypedDict):
    """Settings of ``paceline verify``."""

    accept: NotRequired[Annotated[list[str], Meta(max_length=MAX_KNOBS)]]


class SettingsFile(TypedDict):
    """The content of a settings file. Each knob's value is checked separately."""

    format: Literal["paceline-settings"]
    version: Literal[1]
    knobs: NotRequired[Annotated[dict[str, Any], Meta(max_length=MAX_KNOBS)]]
    made: NotRequired[dict[str, str | int | float | bool]]
    verify: NotRequired[VerifyTable]


@dataclass(frozen=True)
class Setting:
    """The value of one knob.

    Attributes:
        value: The value.
        why: Reasons for it, written as comment lines to the settings file.
    """

    value: Any
    why: tuple[str, ...] = ()


def write_settings(path: Path, knobs: dict[str, Setting], made: dict[str, Any]) -> None:
    head = dumps({"format": FORMAT, "version": VERSION})
    lines = [
        "# For paceline run --settings. Delete the lines of knobs that you do not want.",
        head + "\n[knobs]",
    ]
    for name, setting in knobs.items():
        lines += [f"# {line}" for line in (KNOBS[name].does, *setting.why)]
        lines.append(dumps({name: setting.value}))
    lines.append("[made]\n" + dumps(made) if made else "")
    write_output(path, "\n".join(lines))


def settings_for_script(path: Path, script: str) -> tuple[dict[str, Any], list[str]]:
    """Return the knobs to set for ``script``, and messages about those that are ignored.

    Raises:
        ValueError: The file is not a settings file, or two of its knobs exclude each other.
    """
    tree = read(path)
    made = tree.get("made", {})
    if made.get("script") not in (None, Path(script).name):
        return {}, [
            f"{path} was made for {made['script']}, not for {Path(script).name}, and is ignored. "
            "HINT: run paceline diagnose --try on this script, or delete `script` in the file"
        ]
    knobs, notes = fitting_settings(path, tree)
    return knobs, notes + _other_torch(path, made)


def accepted_differences(path: Path) -> list[str]:
    """Return the names of the differences that ``paceline verify`` accepts.

    Raises:
        ValueError: The file is not a settings file.
    """
    return list(read(path).get("verify", {}).get("accept", []))


def fitting_settings(path: Path, tree: SettingsFile) -> tuple[dict[str, Any], list[str]]:
    """Return the knobs of a file that can be set, and messages about those that are ignored.

    Raises:
        ValueError: Two of the knobs exclude each other.
    """
    knobs, notes = {}, []
    for name, value in tree.get("knobs", {}).items():
        if why := unfit(name, value):
            notes.append(f"{path}: {shorten(name)[1:-1]} = {shorten(value)} is ignored: {why}")
        else:
            knobs[name] = value
    exclude(knobs)
    return knobs, notes


def exclude(knobs: dict[str, Any]) -> None:
    """Check that no two knobs exclude each other.

    Raises:
        ValueError: Two knobs exclude each other.
    """
    for name in knobs:
        for other in KNOBS[name].excludes:
            if other in knobs and other != name:
                raise ValueError(f"{name} and {other} exclude each other. HINT: remove one")


def read(path: Path) -> SettingsFile:
    """Return the content of a settings file.

    Raises:
        ValueError: The file cannot be read or is not a settings file.
    """
    try:
        tree = read_toml(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error_reason(error)}. HINT: paceline diagnose --try") from None
    if tree.get("format") != FORMAT or not isinstance(tree.get("version"), int):
        raise InvalidFileError(
            path,
            f'is not a settings file: format = "{FORMAT}" is missing. HINT: paceline diagnose '
            "--try all --save-settings FILE writes one",
        )
    if tree["version"] > VERSION:
        raise InvalidFileError(
            path,
            f"has version {tree['version']}, and this Paceline reads {VERSION}. HINT: "
            "update Paceline",
        )
    return check(tree, SettingsFile, path)


def unfit(name: str, value: object) -> str:
    """Return why a knob cannot be set, or ""."""
    if name not in KNOBS:
        return f"there is no knob of this name. HINT: use one of {', '.join(settable())}"
    knob = KNOBS[name]
    if knob.value is None:
        return f"this remedy needs an edit of the script. HINT: {knob.edit}"
    return "" if knob.value.fits(value) else f"the value must be {knob.value}"


def settable() -> list[str]:
    return [name for name, knob in KNOBS.items() if knob.hook]


def _other_torch(path: Path, made: dict[str, Any]) -> list[str]:
    from importlib.metadata import version

    here = version("torch")
    if made.get("torch") in (None, here):
        return []
    return [
        f"{path} was made with torch {made['torch']}, and this is torch {here}: gains may differ"
    ]
