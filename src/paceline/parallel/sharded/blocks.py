"""The blocks of a model: the modules whose parameters are gathered and scattered together.

A block is gathered as a whole, so the largest one adds to the memory of every rank, and each one
costs a collective in forward and in backward. Repeated modules (the layers of a transformer, the
stages of a network) are blocks; the rest is divided by size.
"""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

MIN_BLOCK_BYTES = 1 << 20  # of a block that is found by its size
MAX_SHARE = 8  # a module with more than this fraction of the bytes is divided further

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the modules that are blocks, inner ones before those around them.

    The parameters outside of all blocks form one more block, that of the model.

    Args:
        names: Names of modules or of classes. A container without a forward (ModuleList) stands
            for its children. None: find the blocks.

    Raises:
        ValueError: A name matches no module.
    """
    found = _named_blocks(model, names) if names is not None else _automatic_blocks(model)
    modules = dict(model.named_modules())
    kept = [name for name in found if name and not _shares_parameters(model, modules[name])]
    return sorted(dict.fromkeys(kept), key=lambda name: -name.count("."))


def _named_blocks(model: nn.Module, names: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules())
    found: list[str] = []
    for wanted in [names] if isinstance(names, str) else names:
        matches = [n for n, m in modules.items() if wanted in (n, type(m).__name__)]
        if not matches:
            known = [name for name in modules if name]
            known += sorted({type(module).__name__ for module in modules.values()})
            near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
            hint = f"blocks=[{near[0]!r}]" if near else "blocks=None finds the blocks"
            raise ValueError(
                f"world.distribute: blocks contains {wanted!r}, and no module of the "
                f"{type(model).__name__} has this name or class. HINT: {hint}"
            )
        for name in matches:
            found += _with_forward(name, modules[name])
    return found


def _with_forward(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the module's name, or for a container without a forward those of its children."""
    if not isinstance(module, _WITHOUT_FORWARD):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _with_forward(f"{name}.{child_name}" if name else child_name, child)


def _automatic_blocks(model: nn.Module) -> list[str]:
    """Return the repeated modules, and large ones among the others."""
    limit = max(_nbytes(model) // MAX_SHARE, MIN_BLOCK_BYTES)
    found: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        repeated = _repeated_classes(module) if isinstance(module, _CONTAINERS) else set()
        for name, child in module.named_children():
            path, nbytes = f"{prefix}{name}", _nbytes(child)
            if type(child) in repeated and nbytes:
                found.append(path)
            elif nbytes > limit and any(_nbytes(part) for part in child.children()):
                visit(f"{path}.", child)
            elif nbytes >= MIN_BLOCK_BYTES and not isinstance(child, _WITHOUT_FORWARD):
                found.append(path)
            elif isinstance(child, _CONTAINERS):
                visit(f"{path}.", child)

    visit("", model)
    return found


def _repeated_classes(container: nn.Module) -> set[type]:
    """Return the classes of several children that consist of modules themselves."""
    counts = Counter(type(child) for child in container.children() if any(child.children()))
    return {kind for kind, count in counts.items() if count > 1}


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _shares_parameters(model: nn.Module, block: nn.Module) -> bool:
    """Return whether a module outside of the block has one of its parameters (tied weights).

    Such a parameter is needed whenever either of them runs, so it belongs to the model.
    """
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    outside = (module for module in model.modules() if id(module) not in inside)
    return any(id(p) in own for module in outside for p in module.parameters(recurse=False))
