"""Text that Paceline writes to the user's terminal, with its colours and updated lines."""

import re

from .text import printable

# Colours, line erasure and carriage return: Paceline uses them, and they are harmless in any text.
_OWN = re.compile(r"(\x1b\[[0-9;]{0,32}m|\x1b\[2K|\r)")


def for_terminal(text: str) -> str:
    """Return ``text`` with control characters escaped, except line ends and Paceline's own."""
    parts = _OWN.split(text)
    parts[::2] = [printable(part, lines=True) for part in parts[::2]]
    return "".join(parts)
