"""Machine files: read, compared, drawn and written again."""

import io
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Group

from fuzz.scratch import new_folder
from paceline.cost.catalogue import lookup
from paceline.cost.compare_machines import compare
from paceline.cost.machine.machine_file import HostFacts, Machine, as_json, load, save
from paceline.cost.outliers import find_outliers
from paceline.report.console import PlainConsole
from paceline.report.terminal import check as shown
from paceline.report.terminal.draw import draw

sys.path.insert(0, str(Path(__file__).parents[2] / "cost"))
from machines import Maker

FOLDER = new_folder()
FILE = FOLDER / "machine.toml"
GOOD = Maker().machine(2, gpus=1)
warnings.simplefilter("ignore", UserWarning)  # unknown keys


def seeds() -> Iterator[bytes]:
    for machine in (GOOD, Machine("2026-01-31", (HostFacts("a", mask="0-3,8"),))):
        save(machine, FILE)
        yield FILE.read_bytes()


def run(data: bytes) -> None:
    FILE.write_bytes(data)
    machine = load(FILE)
    json.dumps(as_json(machine), allow_nan=False)
    for host in machine.hosts:
        assert len(host.cpus) < 1 << 22
        lookup(host.processor)
    changes = compare(GOOD, machine) + compare(machine, machine)
    oddities = find_outliers(machine)
    if len(data) % 8 == 0:
        text = io.StringIO()
        console = PlainConsole(file=text, width=100)
        blocks = shown.machines_blocks(GOOD, machine, changes)
        console.print(Group(*draw([*shown.check_blocks(machine, oddities, []), *blocks])))
        assert "\x1b" not in text.getvalue()
    save(machine, FILE)
    assert asdict(load(FILE)) == asdict(machine)
