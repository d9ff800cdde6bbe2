"""Parser of host lists of Slurm and Flux: "host[1-3,5],n07", "n[001-012]", "rack[1-2]n[1-4]"."""

import itertools
import math
import re

MAX_EXPANDED = 100_000  # hosts or numbers from one text; more is taken for a typing error


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of a host list, in its order.

    Raises:
        ValueError: ``text`` is not a host list, or has too many hosts.
    """
    names: list[str] = []
    for part in split_hostlist(text):
        pieces = re.split(r"\[([^][]*)\]", part)  # literal, inside, literal, inside, ..., literal
        if re.search(r"[\s\[\]]", "".join(pieces[::2])):
            raise _mistake(text, f"{part!r} is not a host name")
        try:
            choices = [expand_numbers(p) if index % 2 else [p] for index, p in enumerate(pieces)]
        except ValueError as mistake:
            raise _mistake(text, str(mistake)) from None
        if len(names) + math.prod(len(choice) for choice in choices) > MAX_EXPANDED:
            raise _mistake(text, f"that is more than {MAX_EXPANDED} hosts")
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's notation of one number per host: "2(x3),1" to [2, 2, 2, 1].

    Raises:
        ValueError: ``text`` is not in this notation, or has too many hosts.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is not a list of counts. HINT: write it as in 2(x3),1")
        times = int(match[2] or 1)
        if len(found) + times > MAX_EXPANDED:
            raise ValueError(f"{text!r} counts more than {MAX_EXPANDED} hosts")
        found += [int(match[1])] * times
    return found


def expand_numbers(text: str) -> list[str]:
    """Expand "3-5,008" to ["3", "4", "5", "008"].

    The numbers of a range are zero-padded to the width of its first number.

    Raises:
        ValueError: ``text`` is not such a list, or has too many numbers.
    """
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part!r} runs backwards")
        if len(found) + last - first >= MAX_EXPANDED:
            raise ValueError(f"{text!r} has more than {MAX_EXPANDED} numbers")
        found += [str(n).zfill(len(match[1])) for n in range(first, last + 1)]
    return found


def split_hostlist(text: str) -> list[str]:
    """Split a host list at the commas outside brackets.

    Raises:
        ValueError: Brackets do not match, or a name is empty.
    """
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _mistake(text, "its brackets don't match")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise _mistake(text, "its brackets don't match")
    parts = [part.strip() for part in parts]
    if "" in parts:
        raise _mistake(text, "a name is empty")
    return parts


def _mistake(text: str, what: str) -> ValueError:
    return ValueError(
        f"the host list {text!r} is not understood: {what}. HINT: write it as in n[1-3,7],m01"
    )
