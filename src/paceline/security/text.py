"""Make text of files, scripts and jobs printable.

A control character in a terminal is a command: it moves the cursor, sets the window's title, and
in some terminals types into the shell. Text that does not come from Paceline itself passes through
``printable`` when it is read, or at the latest when it is printed.
"""

import re
from typing import Any

# C0 and C1 controls, DEL, surrogates, and characters that change text direction (bidi controls).
_CONTROLS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_A_LINE = re.compile(f"[{_CONTROLS}]")
_IN_LINES = re.compile(f"[{_CONTROLS}]".replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: str, lines: bool = False) -> str:
    """Return ``text`` with each control character escaped, for example as ``\\x1b``.

    Args:
        lines: Whether to leave line ends and tabs unchanged.
    """
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escaped, text)


def printable_tree(tree: Any) -> Any:
    """Return a parsed JSON or TOML tree with all strings, including keys, made ``printable``."""
    if isinstance(tree, str):
        return printable(tree, lines=True)
    if isinstance(tree, dict):
        return {printable_tree(key): printable_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(printable_tree(value) for value in tree)
    return tree


def _escaped(match: "re.Match[str]") -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
