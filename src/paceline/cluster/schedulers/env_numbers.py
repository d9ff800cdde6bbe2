"""Reading of numbers from environment variables, with errors that name the variable."""

from collections.abc import Mapping

Environment = Mapping[str, str]
# Number of threads of a rank: for OpenMP and torch, and for TensorFlow, which would use all cores
# that the rank may use.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def openmp_threads(environment: Environment) -> int | None:
    """Return the number of threads in OMP_NUM_THREADS; None if it is missing or not valid.

    The value may list a number for each level of nested parallel regions ("4,2"). torch uses the
    first.
    """
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if is_number(text) and int(text) > 0 else None


def number(environment: Environment, name: str) -> int | None:
    """Return the number in an environment variable, or None if it is not set.

    Raises:
        ValueError: The value is not a number.
    """
    text = environment.get(name)
    if text is None:
        return None
    if not is_number(text.strip()):
        raise ValueError(
            f"the environment has {name}={text!r}, which is not a number. "
            "HINT: its launcher or scheduler sets it; unset it where it was set by hand"
        )
    return int(text)
