"""Make text of files, scripts and jobs printable.

A control character in a terminal is a command: it moves the cursor, sets the window's title, and
in some terminals types into the shell. Invisible characters hide text, or make two names look the
same. Text that does not come from Paceline itself passes through ``printable`` when it is read, or
at the latest when it is printed.
"""

import re
import unicodedata
from typing import Any

_NOT_ASCII_TEXT = re.compile(r"[^\x20-\x7e]")
# Joiners, and selectors of a glyph's variant: scripts and emoji need them next to other characters.
_JOINERS = frozenset("\u200c\u200d")
_SELECTORS = re.compile("[\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# Characters of Unicode's property Default_Ignorable_Code_Point that are letters or marks, and a
# blank symbol.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
# Format characters (category Cf) that are visible: signs of Arabic, Syriac and Kaithi.
_VISIBLE = frozenset(
    "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
)
# Colours, line erasure and carriage return: Paceline uses them, and they are harmless in any text.
_OF_PACELINE = re.compile(r"(\x1b\[[0-9;]{0,32}m|\x1b\[2K|\r)")


def printable(text: str, lines: bool = False) -> str:
    """Return ``text`` with each control or invisible character escaped, for example as ``\\x1b``.

    These are the categories Cc, Cf, Cs, Co, Cn, Zl and Zp of Unicode, and letters and marks that
    show nothing. Joiners and variation selectors remain where a script or an emoji needs them.

    Args:
        lines: Whether to leave line ends and tabs unchanged.
    """

    def replace(match: "re.Match[str]") -> str:
        char = match[0]
        return char if (lines and char in "\n\t") or _is_shown(match) else _escaped(char)

    return _NOT_ASCII_TEXT.sub(replace, text)


def for_terminal(text: str) -> str:
    """Return ``text`` with control characters escaped, except line ends and Paceline's own."""
    parts = _OF_PACELINE.split(text)
    parts[::2] = [printable(part, lines=True) for part in parts[::2]]
    return "".join(parts)


def printable_tree(tree: Any, lines: bool = True) -> Any:
    """Return a parsed JSON or TOML tree with all strings, including keys, made ``printable``."""
    if isinstance(tree, str):
        return printable(tree, lines)
    if isinstance(tree, dict):
        pairs = tree.items()
        return {printable_tree(key, lines): printable_tree(value, lines) for key, value in pairs}
    if isinstance(tree, list | tuple):
        return type(tree)(printable_tree(value, lines) for value in tree)
    return tree


def _is_shown(match: "re.Match[str]") -> bool:
    """Whether a character is visible, or changes how its visible neighbours look."""
    char, before = match[0], match.string[match.start() - 1 : match.start()]
    if char in _JOINERS:
        after = match.string[match.end() : match.end() + 1]
        return _joins(before, "LMS") and _joins(after, "LS")
    if _SELECTORS.match(char):
        return _joins(before, "LS")
    if char in _INVISIBLE:
        return False
    return char.isprintable() or char in _VISIBLE or unicodedata.category(char) == "Zs"


def _joins(neighbour: str, categories: str) -> bool:
    """Whether a neighbour of a joiner is a visible character beyond ASCII of these categories."""
    return bool(
        neighbour
        and not neighbour.isascii()
        and neighbour not in _INVISIBLE
        and unicodedata.category(neighbour)[0] in categories
    )


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
