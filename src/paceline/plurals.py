"""Counts and ordinal numbers in messages: "1 rank", "4 ranks", "every 2nd step"."""


def counted(number: float, noun: str, plural: str = "") -> str:
    """Format a count with its noun: "1 rank", "4 ranks", "12,000 samples", "2.5 files".

    plural: Needed where it is not the noun with an s: "batches".
    """
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {noun if text == '1' else plural or noun + 's'}"


def ordinal(number: int) -> str:
    """Format an ordinal number: "1st", "2nd", "3rd", "4th", "11th", "21st"."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number:,}{ending or 'th'}"
