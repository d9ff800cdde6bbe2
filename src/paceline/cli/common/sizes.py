"""Parser of sizes such as 16M."""

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bytes_of(text: str, option: str) -> int:
    """Return the number of bytes of a size, e.g. 16777216 for 16M.

    Raises:
        ValueError: ``text`` is not a size; the message names ``option``.
    """
    number, unit = text.strip().rstrip("iB"), 1
    if number[-1:].upper() in UNITS:
        unit = UNITS[number[-1].upper()]
        number = number[:-1]
    try:
        return int(float(number) * unit)
    except ValueError:
        raise ValueError(
            f"{option} must be a size; this is {text!r}. HINT: 64K, 16M or 1G"
        ) from None
