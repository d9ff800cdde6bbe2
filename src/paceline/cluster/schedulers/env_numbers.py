"""Reading of numbers from environment variables, with errors that name the variable."""

from collections.abc import Mapping

Environment = Mapping[str, str]


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


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
