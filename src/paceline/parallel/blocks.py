"""The blocks of a model: modules that are repeated, such as the layers of a transformer."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

MAX_SHARE = 8  # a module with more than this fraction of the parameters' bytes is divided further

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward


def find_blocks(
    model: nn.Module, names: Sequence[str] | None = None, *, by_size: bool = True
) -> list[tuple[str, nn.Module]]:
    """Return name and module of each block, in order of registration; no block contains another.

    Args:
        names: Names of modules or of classes. A container without a forward (ModuleList) stands
            for its children. None: the outermost modules whose class occurs several times among
            the children of one module, and that consist of modules themselves.
        by_size: Divide a model without repeated modules by the bytes of its parameters.

    Raises:
        ValueError: A name matches no module.
    """
    if names is not None:
        chosen = _named(model, [names] if isinstance(names, str) else names)
    else:
        chosen = list(_repeated(model, ""))
        if not chosen and by_size:
            chosen = list(_large(model, "", max(_nbytes(model) // MAX_SHARE, 1)))
    inner = {id(part) for _, module in chosen for part in module.modules() if part is not module}
    unique = {id(module): (name, module) for name, module in reversed(chosen)}
    return [entry for key, entry in reversed(unique.items()) if key not in inner]


def _named(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = {name: module for name, module in model.named_modules() if name}
    for wanted in names:
        if not any(wanted in (name, type(module).__name__) for name, module in modules.items()):
            known = [*modules, *sorted({type(module).__name__ for module in modules.values()})]
            near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
            hint = f"blocks=[{near[0]!r}]" if near else "without blocks= they are found"
            raise ValueError(
                f"world.distribute: blocks contains {wanted!r}, and no module of the "
                f"{type(model).__name__} has this name or class. HINT: {hint}"
            )
    return [
        entry
        for name, module in modules.items()
        if name in names or type(module).__name__ in names
        for entry in _with_forward(name, module)
    ]


def _with_forward(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, _CONTAINERS):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _with_forward(f"{name}.{child_name}", child)


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(name, child) for name, child in module.named_children() if any(child.children())]
    counts = Counter(type(child) for _, child in children)
    for name, child in children:
        if counts[type(child)] > 1 and not isinstance(child, (*_CONTAINERS, nn.Sequential)):
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _large(module: nn.Module, prefix: str, limit: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS) or (_nbytes(child) > limit and any(child.children())):
            yield from _large(child, f"{prefix}{name}.", limit)
        elif _nbytes(child):
            yield prefix + name, child


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
