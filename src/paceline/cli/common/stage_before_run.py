"""Check or pack the datasets of ``paceline run --stage`` before the ranks start."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...launch.options import NodeOptions
from ...security.processes import python_command
from .base import say


def sets_of(stage: Sequence[Path], pack: Sequence[str], where: NodeOptions) -> list[str]:
    """Return the absolute paths of the datasets to stage; pack those that are not packed yet.

    Args:
        stage: Values of --stage, in order.
        pack: Values of --pack, in order; the i-th belongs to the i-th value of ``stage``.
        where: The hosts of the job, which pack the datasets.

    Raises:
        ValueError: A path is not a packed dataset, there is no folder to pack or stage into, or
            packing fails.
    """
    from ...data.format.shard_format import META_FILE, load_meta
    from ...data.staging.staged_sets import VARIABLE

    if len(pack) > len(stage):
        raise ValueError(
            f"--pack {pack[len(stage)]} has no folder to pack into. HINT: add one --stage FOLDER "
            "for each --pack"
        )
    if stage and not os.environ.get(VARIABLE):
        raise ValueError(
            f"--stage {stage[0]}: the destination folder is missing. HINT: set {VARIABLE} to a "
            "node-local folder: a local disk, or /dev/shm"
        )
    for folder, words in zip(stage, pack, strict=False):
        if not (folder / META_FILE).exists():
            _packed(shlex.split(words), folder, where)
    for folder in stage:
        load_meta(folder)
    return [str(folder.resolve()) for folder in stage]


def _packed(words: list[str], dest: Path, where: NodeOptions) -> None:
    """Pack a dataset in a child process.

    The child ends with this process, so that no process still packs into ``dest`` when the user
    repeats the command.
    """
    if not {"-n", "--ranks", "-H", "--hosts", "--hostfile"} & set(words):
        words = [*words, *_words_of_pack(where)]
    command = ["pack", *words, str(dest)]
    say(f"{dest} is not packed yet: paceline {shlex.join(command)}")
    done = subprocess.run(
        python_command("-m", "paceline", *command), stdout=sys.stderr, preexec_fn=_ends_with_it
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise ValueError(
            f"--pack: paceline pack ended with exit code {done.returncode}, and no rank was started"
        )


def _words_of_pack(nodes: NodeOptions) -> list[str]:
    """Return the options with which ``paceline pack`` uses the nodes of the job.

    They request one rank per known core; nodes are taken to have as many hardware threads per core
    as this one. The list is empty for a single node, on which threads are sufficient.
    """
    from ...cluster.topology.topology import topology
    from ...launch.target import find_target

    found = find_target(nodes).hosts
    if len(found) < 2:
        return []
    here = topology()
    cores = sum(here.cores_of_cpus(host.cpus) if host.cpus else host.slots or 1 for host in found)
    is_named = nodes.hosts or nodes.hostfile
    return [*([] if is_named else ["-n", str(cores)]), *nodes.words()]


def _ends_with_it() -> None:
    from ...launch.linux_processes import PARENT_DEATH_SIGNAL, prctl

    prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
