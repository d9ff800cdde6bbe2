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
    waiting = {}
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            waiting[name] = patch
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that delegates to the other finders and patches the module after its loader ran."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self.patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self.patches.pop(name, None)  # popped: the search below does not come back here
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                patch(module)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec
