"""Call a function right after a module has been imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]  # is called with the module


def after_import(patches: dict[str, Patch]) -> None:
    """Call each patch with its module: now if it is imported, otherwise after its import."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            _finder.patches.setdefault(name, []).append(patch)
    if _finder.patches and sys.meta_path[0] is not _finder:  # before finders of other libraries
        sys.meta_path[:] = [_finder, *(finder for finder in sys.meta_path if finder is not _finder)]


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that delegates to the other finders and patches the module after its loader ran.

    A module that is only looked for (``importlib.util.find_spec``) is patched at its later import.
    """

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        self._searched: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.patches or name in self._searched:
            return None
        self._searched.add(name)  # the search below does not come back here
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searched.discard(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                for patch in self.patches.pop(name, ()):
                    patch(module)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec


_finder = _Finder()
