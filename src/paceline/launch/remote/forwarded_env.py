"""Environment variables for nodes whose tool does not forward the environment (ssh, blaunch)."""

import os
from collections.abc import Sequence

FORWARDED_NAMES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PACELINE_TRIAL",
    "LANG",
    "TZ",
    "NO_COLOR",
)
FORWARDED_PREFIXES = (
    *("PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "NCCL_"),
    *("GLOO_", "UCX_", "FI_", "CONDA_", "LC_", "HF_", "TF_", "JAX_", "XLA_", "PBS_", "HOROVOD_"),
)
# What the loader and Python read before any program of ours runs.
INTERPRETER_PREFIXES = ("LD_LIBRARY_PATH", "PYTHON")
# Of a login on the host itself.
LOGIN_NAMES = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")
# In names of environment variables whose values are not written to records.
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def forwarded_variables() -> dict[str, str]:
    """Return this process's environment variables that are forwarded."""
    return {
        k: v
        for k, v in os.environ.items()
        if k in FORWARDED_NAMES or k.startswith(FORWARDED_PREFIXES)
    }


def interpreter_variables() -> dict[str, str]:
    """Return those that must be set when the agent's Python starts."""
    return {k: v for k, v in os.environ.items() if k.startswith(INTERPRETER_PREFIXES)}


def login_variables() -> dict[str, str]:
    """Return the environment of an agent on this host, same as on other hosts."""
    return {k: v for k, v in os.environ.items() if k in LOGIN_NAMES} | forwarded_variables()


def shown_env_options(given: Sequence[str]) -> list[str]:
    """Return values of ``--env`` for commands that reports print, without secrets."""
    return [
        f"{text.partition('=')[0]}=..." if "=" in text and _is_secret(text) else text
        for text in given
    ]


def _is_secret(text: str) -> bool:
    name = text.partition("=")[0].upper()
    return any(word in name for word in SECRET_WORDS)


def parse_env_options(wanted: list[str]) -> dict[str, str]:
    """Parse ``--env NAME`` and ``--env NAME=VALUE``.

    Raises:
        ValueError: A name has no value here.
    """
    found = {}
    for text in wanted:
        name, given, value = text.partition("=")
        if not name.isidentifier():
            raise ValueError(
                f"--env must be NAME or NAME=VALUE; this is {text!r}. HINT: --env NAME=VALUE"
            )
        if not given and name not in os.environ:
            raise ValueError(
                f"--env {name}: {name} is not set in this environment. HINT: --env {name}=VALUE"
            )
        found[name] = value if given else os.environ[name]
    return found
