"""Tell what the bytes of a sample are from their first bytes, as PIL does. Names can be wrong."""

import re
from typing import NamedTuple

JPEGS = (".jpg", ".jpeg", ".jpe")
IMAGES = (*JPEGS, ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm", ".jp2")
ARRAYS = (".npy",)
UNKNOWN = ".bin"  # bytes of an unknown kind
HEAD_BYTES = 64  # of a file or member, sufficient for ``extension_of``
# Suffixes that commands append to the name of a compressed file, and the commands.
DECOMPRESS = {"gzip": "gzip -d", "zstd": "zstd -d", "bzip2": "bzip2 -d", "xz": "xz -d"}
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")


class Signature(NamedTuple):
    """First bytes of a kind of file.

    Attributes:
        extensions: Extensions of this kind, the usual one first.
        pattern: Regular expression of the first bytes.
        shared: Whether other kinds of file begin like this, too: raw photos and slides are TIFF
            files that PIL does not decode, and a text may begin like a PPM. The signature then
            counts only for an image's name, or without one.
    """

    extensions: tuple[str, ...]
    pattern: bytes
    shared: bool = False


SIGNATURES = (
    Signature(JPEGS, rb"\xff\xd8\xff"),
    Signature((".png",), rb"\x89PNG\r\n\x1a\n"),
    Signature((".gif",), rb"GIF8[79]a"),
    Signature((".webp",), rb"RIFF....WEBPVP8[ LX]"),
    Signature((".bmp",), rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0"),
    Signature((".jp2",), rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51"),
    Signature((".tif", ".tiff"), rb"II[*+]\0|MM\0[*+]", shared=True),
    Signature((".ppm", ".pgm"), rb"P[1-6fF]\s(\s|#[^\n]*\n)*\d+\s", shared=True),
    Signature(ARRAYS, rb"\x93NUMPY"),
)
_MATCHERS = [(signature, re.compile(signature.pattern, re.DOTALL)) for signature in SIGNATURES]
_COMPRESSIONS = {
    "gzip": b"\x1f\x8b",
    "zstd": b"\x28\xb5\x2f\xfd",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\0",
}


def extension_of(data: bytes, named: str = "") -> str:
    """Return the extension of a file's kind, as ".jpg".

    The first bytes decide. For bytes that begin with no known signature, or with one that several
    kinds share, it is ``named``, the extension of the file's name, or UNKNOWN without one.
    """
    head = data[:HEAD_BYTES]
    for signature, pattern in _MATCHERS:
        if pattern.match(head) and (
            not signature.shared or named in ("", UNKNOWN) or named in (*IMAGES, *ARRAYS)
        ):
            return named if named in signature.extensions else signature.extensions[0]
    return named or UNKNOWN


def kind_of(extension: str) -> str:
    """Return "images", "arrays" or "files"."""
    return "images" if extension in IMAGES else "arrays" if extension in ARRAYS else "files"


def compression_of(head: bytes) -> str:
    """Return "gzip", "zstd", "bzip2" or "xz" if these first bytes are of a compressed file."""
    return next((name for name, magic in _COMPRESSIONS.items() if head.startswith(magic)), "")
