"""Before the ranks start: the sets that ``paceline run --stage`` names are there, or packed."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Where:
    """The hosts, as the options of ``paceline run`` say."""

    hosts: str | None = None
    hostfile: Path | None = None
    launcher: str | None = None

    def of_pack(self) -> list[str]:
        """The options that have ``paceline pack`` use them, a rank for each core that is known of;
        none on one host, where threads do."""
        from ...launch.target import target

        found = target(self.hosts, self.hostfile, self.launcher).hosts
        if len(found) < 2:
            return []
        named = {"-H": self.hosts, "--hostfile": self.hostfile, "--launcher": self.launcher}
        words = [str(word) for pair in named.items() if pair[1] is not None for word in pair]
        cores = sum(one.cpus or one.slots or 1 for one in found)
        return words if self.hosts or self.hostfile else ["-n", str(cores), *words]


def sets_of(stage: Sequence[Path], pack: Sequence[str], where: Where) -> list[str]:
    """Their absolute paths; what is not packed yet is packed. stage, pack: as the options say, the
    first with the first.

    Raises ValueError for what is no packed set, or has nowhere to go, and where packing fails.
    """
    from ...data.format.shard_format import META_FILE, load_meta
    from ...data.staging.stage import VARIABLE

    if len(pack) > len(stage):
        raise ValueError(
            f"--pack {pack[len(stage)]}: into which folder? HINT: --stage FOLDER, one for each "
            "--pack"
        )
    if stage and not os.environ.get(VARIABLE):
        raise ValueError(
            f"--stage {stage[0]}: where to? HINT: {VARIABLE}=/local (a folder of each host's own: "
            "a disk, or /dev/shm)"
        )
    for one, words in zip(stage, pack, strict=False):
        if not (one / META_FILE).exists():
            _packed(shlex.split(words), one, where)
    for one in stage:
        load_meta(one)
    return [str(one.resolve()) for one in stage]


def _packed(words: list[str], dest: Path, where: Where) -> None:
    """By a process that ends with this one, so that nobody packs there when it is said again."""
    if not {"-n", "--ranks", "-H", "--hosts", "--hostfile"} & set(words):
        words = [*words, *where.of_pack()]
    command = ["pack", *words, str(dest)]
    sys.stderr.write(f"paceline: {dest} is not packed yet: paceline {shlex.join(command)}\n")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *command], stdout=sys.stderr, preexec_fn=_ends_with_it
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise ValueError(f"--pack: exit code {done.returncode}: no rank was started")


def _ends_with_it() -> None:
    from ...launch.linux_prctl import PARENT_DEATH_SIGNAL, prctl

    prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
