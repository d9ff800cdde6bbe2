"""What Paceline writes to the user's terminal, with its own colours and moving lines."""

import re

from .text import printable

# Colours, an erased line and a return to its start: Paceline's own, and harmless in others' text.
_OWN = re.compile(r"(\x1b\[[0-9;]{0,32}m|\x1b\[2K|\r)")


def for_terminal(text: str) -> str:
    """Return ``text`` with all control characters escaped but line ends and Paceline's own."""
    parts = _OWN.split(text)
    parts[::2] = [printable(part, lines=True) for part in parts[::2]]
    return "".join(parts)
