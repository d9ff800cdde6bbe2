"""Knobs of Horovod scripts: environment variables that ``hvd.init()`` reads.

Horovod reads the same variables where it is installed.
"""

import os

from ...knobs.knob import KnobResult
from ...record.hooks.import_hooks import after_import


def fusion_threshold(megabytes: float, turned: KnobResult) -> None:
    """Set the maximum size of tensors that are exchanged together."""
    _set("HOROVOD_FUSION_THRESHOLD", str(int(megabytes * 2**20)), turned)


def cycle_time(milliseconds: float, turned: KnobResult) -> None:
    """Set the time in which submitted tensors are collected."""
    _set("HOROVOD_CYCLE_TIME", f"{milliseconds:g}", turned)


def _set(variable: str, value: str, turned: KnobResult) -> None:
    """Set an environment variable, replacing a value from the environment.

    The result is reported when the script imports Horovod.
    """
    os.environ[variable] = value
    if "HOROVOD_RANK" not in os.environ:  # of scripts that use Horovod
        turned.not_done("the script does not use Horovod")
        return
    after_import({"horovod": lambda _: turned.done()})
