"""What a run of ``paceline verify`` observes, and where it ends: set for each rank's process."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..security.shared_folder import sees_token

VARIABLE = "PACELINE_VERIFY"  # environment variable that holds VerifySettings.to_json()


@dataclass(frozen=True)
class VerifySettings:
    """The settings of one run of the script.

    Attributes:
        folder: Folder of the facts, the same for all ranks of a node.
        covered: Folders of the user that an overlay covers, so that they need no other protection.
        batches: Batches of a pass, at least: longer passes are shortened where that is safe.
        evaluated: Batches of an evaluation, at least, where the loader has a length.
        passes: Passes over the training loader that are observed.
        steps: Optimizer steps after which the run ends, if it has lasted so many seconds.
        max_steps: Optimizer steps after which it ends.
        seconds: Seconds since the first batch.
        keeps_mib: Maximum MiB of batches and of initial parameters that the ranks together store
            for a replay.
        replays: Folder of an earlier run whose batches are trained, in the same order; "": none.
        permutes: Whether the samples of each replayed batch have another order, and the parameters
            before the first step other last bits: what differs then is rounding.
        last_bits: Relative change of the parameters in a replay that permutes, in roundings of
            their dtype.
        accumulates: Whether a replay trains each global batch in parts: those of the ranks.
        traces: Whether the operators of the first step are listed, with checksums of their results.
        token: Number of a file that each rank looks for in the folder, whether its node shares it;
            None: it does not.
    """

    folder: str
    covered: tuple[str, ...] = ()
    batches: int = 6
    evaluated: int = 24
    passes: int = 3
    steps: int = 40
    max_steps: int = 160
    seconds: float = 10.0
    keeps_mib: int = 0
    replays: str = ""
    permutes: bool = False
    last_bits: float = 2.0
    accumulates: bool = False
    traces: bool = False
    token: int | None = None

    def to_json(self) -> str:
        """Return the value of the environment variable ``VARIABLE``."""
        return json.dumps(asdict(self))


def settings_of_process(environment: Mapping[str, str] = os.environ) -> VerifySettings | None:
    """Return the settings of the run that this process is part of; None if it is part of none."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    fields = json.loads(text)
    return VerifySettings(**fields | {"covered": tuple(fields["covered"])})


NOT_SHARED = "paceline: verify: this node does not share the folder"  # begins the error


def check_folder(settings: VerifySettings) -> None:
    """Check, before the script runs, that this node sees and can write the folder of the run.

    Raises:
        SystemExit: It does not. The message is printed.
    """
    if settings.token is None:
        return
    folder = Path(settings.folder)
    if sees_token(folder, settings.token) and os.access(folder, os.W_OK):
        return
    raise SystemExit(
        f"{NOT_SHARED} {folder.parent} ({socket.gethostname()}). HINT: let TMPDIR be a folder that "
        "all nodes share: TMPDIR=$HOME paceline verify ..."
    )
