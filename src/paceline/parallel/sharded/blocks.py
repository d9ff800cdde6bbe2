"""The blocks of a model: the modules whose parameters are gathered and scattered together.

A block is gathered as a whole, so the largest one adds to the memory of every rank, and each one
costs a collective in forward and in backward. Repeated modules (the layers of a transformer, the
stages of a network) are blocks; the rest is divided by size.
"""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from ..blocks import MAX_SHARE, WITHOUT_FORWARD, named_blocks, nbytes_of

MIN_BLOCK_BYTES = 1 << 20  # of a block that is found by its size

_CONTAINERS = (*WITHOUT_FORWARD, nn.Sequential)


def find_blocks(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the modules that are blocks, inner ones before those around them.

    The parameters outside of all blocks form one more block, that of the model.

    Args:
        names: Names of modules or of classes. A container without a forward (ModuleList) stands
            for its children. None: find the blocks.

    Raises:
        ValueError: A name matches no module.
    """
    found = named_blocks(model, names) if names is not None else _automatic_blocks(model)
    modules = dict(model.named_modules())
    kept = [name for name in found if name and not _shares_parameters(model, modules[name])]
    return sorted(dict.fromkeys(kept), key=lambda name: -name.count("."))


def _automatic_blocks(model: nn.Module) -> list[str]:
    """Return the repeated modules, and large ones among the others."""
    limit = max(nbytes_of(model) // MAX_SHARE, MIN_BLOCK_BYTES)
    found: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        repeated = _repeated_classes(module) if isinstance(module, _CONTAINERS) else set()
        for name, child in module.named_children():
            path, nbytes = f"{prefix}{name}", nbytes_of(child)
            if type(child) in repeated and nbytes:
                found.append(path)
            elif nbytes > limit and any(nbytes_of(part) for part in child.children()):
                visit(f"{path}.", child)
            elif nbytes >= MIN_BLOCK_BYTES and not isinstance(child, WITHOUT_FORWARD):
                found.append(path)
            elif isinstance(child, _CONTAINERS):
                visit(f"{path}.", child)

    visit("", model)
    return found


def _repeated_classes(container: nn.Module) -> set[type]:
    """Return the classes of several children that consist of modules themselves."""
    counts = Counter(type(child) for child in container.children() if any(child.children()))
    return {kind for kind, count in counts.items() if count > 1}


def _shares_parameters(model: nn.Module, block: nn.Module) -> bool:
    """Return whether a module outside of the block has one of its parameters (tied weights).

    Such a parameter is needed whenever either of them runs, so it belongs to the model.
    """
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    outside = (module for module in model.modules() if id(module) not in inside)
    return any(id(p) in own for module in outside for p in module.parameters(recurse=False))
