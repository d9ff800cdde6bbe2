"""Results of trainings, kept in a file as they end, so that an interrupted study continues."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class KeptRuns:
    """Results by function and arguments; those of other versions of the sources are ignored.

    Args:
        path: File of JSON lines.
        sources: By name of a function: the files on which its results depend.
    """

    def __init__(self, path: Path, sources: dict[str, Sequence[Path]]) -> None:
        self._path = path
        self._versions = {
            name: hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
            for name, files in sources.items()
        }
        self._found: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                version, key, result = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote
            if version == self._versions.get(json.loads(key)[0]):
                self._found[key] = result

    def __call__(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Return the result of ``function(**arguments)``, from the file if it is there."""
        key = json.dumps([function.__name__, arguments], sort_keys=True)
        if key not in self._found:
            self._found[key] = function(**arguments)
            with self._path.open("a") as file:
                # a line break first: the last line of a killed process may have none
                line = json.dumps([self._versions[function.__name__], key, self._found[key]])
                file.write(f"\n{line}\n")
        return self._found[key]
