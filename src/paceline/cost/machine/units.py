"""Format measured values for people: units of the field, powers of ten."""

from collections.abc import Sequence

_UP = ("", "k", "M", "G", "T", "P", "E")
_DOWN = ("", "m", "µ", "n")


def format_value(value: float, unit: str) -> str:
    """Return a value with its unit: 1.23e12 FLOP/s as "1.23 TFLOP/s", 1.2e-6 s as "1.2 µs"."""
    if unit == "files/s":
        return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.3g} {unit}"
    step, prefix = 0, ""
    if unit == "s":
        while 0 < value < 0.9995 and step < len(_DOWN) - 1:
            value, step = 1000 * value, step + 1
        prefix = _DOWN[step]
    else:
        while value >= 999.5 and step < len(_UP) - 1:
            value, step = value / 1000, step + 1
        prefix = _UP[step]
    digits = f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
    return f"{digits} {prefix}{unit}"


def size(count: float) -> str:
    """Return a number of bytes with a binary unit: 2048 as "2 KiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.0f} {units[0]}" if count >= 999.5 else f"{count:.3g} {units[0]}"


def join_words(names: Sequence[str], most: int = 4) -> str:
    """Return "a", "a and b" or "a, b and c"; names beyond ``most`` are only counted."""
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
