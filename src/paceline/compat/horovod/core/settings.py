"""Horovod's environment variables that have a meaning here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Values of the environment variables.

    Attributes:
        fusion_bytes: Largest sum of tensors that are exchanged together (HOROVOD_FUSION_THRESHOLD).
        cycle_s: Time in which submitted operations are collected while no thread waits for one
            (HOROVOD_CYCLE_TIME, in ms).
        cache_capacity: Operations that ranks remember (HOROVOD_CACHE_CAPACITY).
        stall_check_s: Time after which a missing submission is reported; 0 for never
            (HOROVOD_STALL_CHECK_TIME_SECONDS, HOROVOD_STALL_CHECK_DISABLE).
        stall_shutdown_s: Time after which it is an error; 0 for never
            (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).
        fuses_groups: Whether grouped operations are exchanged together with others
            (HOROVOD_DISABLE_GROUP_FUSION).
    """

    fusion_bytes: int = 128 << 20
    cycle_s: float = 0.001
    cache_capacity: int = 1024
    stall_check_s: float = 60.0
    stall_shutdown_s: float = 0.0
    fuses_groups: bool = True

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Return the settings of the environment.

        Raises:
            ValueError: A variable is not a number of at least 0.
        """
        disabled = _number(environment, "HOROVOD_STALL_CHECK_DISABLE", 0) > 0
        return cls(
            int(_number(environment, "HOROVOD_FUSION_THRESHOLD", cls.fusion_bytes)),
            _number(environment, "HOROVOD_CYCLE_TIME", cls.cycle_s * 1e3) / 1e3,
            int(_number(environment, "HOROVOD_CACHE_CAPACITY", cls.cache_capacity)),
            0.0
            if disabled
            else _number(environment, "HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_check_s),
            _number(environment, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown_s),
            not _number(environment, "HOROVOD_DISABLE_GROUP_FUSION", 0),
        )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"{name} must be a number of at least 0; this is {text!r}. HINT: unset {name}"
        )
    return value
