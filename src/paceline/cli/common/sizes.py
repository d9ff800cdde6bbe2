"""Sizes as people say them."""

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bytes_of(text: str, option: str) -> int:
    """16M as 16777216. Raises ValueError, with the option's name, for what is no size."""
    number, unit = text.strip().rstrip("iB"), 1
    if number[-1:].upper() in UNITS:
        unit = UNITS[number[-1].upper()]
        number = number[:-1]
    try:
        return int(float(number) * unit)
    except ValueError:
        raise ValueError(f"{option} {text}: no size. HINT: 64K, 16M or 1G") from None
