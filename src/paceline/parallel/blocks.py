"""The blocks of a model: modules that are repeated, such as the layers of a transformer."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

MAX_SHARE = 8  # a module with more than this fraction of the parameters' bytes is divided further

WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)  # they have no forward


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
        modules = dict(model.named_modules())
        named = named_blocks(model, names, "recomputed_blocks")
        chosen = [(name, modules[name]) for name in modules if name and name in named]
    else:
        chosen = list(_repeated(model, ""))
        if not chosen and by_size:
            chosen = list(_large(model, "", max(nbytes_of(model) // MAX_SHARE, 1)))
    inner = {id(part) for _, module in chosen for part in module.modules() if part is not module}
    unique = {id(module): (name, module) for name, module in reversed(chosen)}
    return [entry for key, entry in reversed(unique.items()) if key not in inner]


def named_blocks(model: nn.Module, names: Sequence[str], option: str = "blocks") -> list[str]:
    """Return the names of the modules with these names or classes; "" is the model itself.

    A container without a forward (ModuleList) stands for its children.

    Args:
        option: Option of ``world.distribute`` that the names are of.

    Raises:
        ValueError: A name matches no module.
    """
    modules = dict(model.named_modules())
    found: list[str] = []
    for wanted in [names] if isinstance(names, str) else names:
        matches = [n for n, m in modules.items() if wanted in (n, type(m).__name__)]
        if not matches:
            known = [name for name in modules if name]
            known += sorted({type(module).__name__ for module in modules.values()})
            near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
            hint = f"{option}=[{near[0]!r}]" if near else f"leave {option} out: they are found"
            raise ValueError(
                f"world.distribute: {option} contains {wanted!r}, and no module of the "
                f"{type(model).__name__} has this name or class. HINT: {hint}"
            )
        for name in matches:
            found += _with_forward(name, modules[name])
    return found


def _with_forward(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the module's name, or for a container without a forward those of its children."""
    if not isinstance(module, WITHOUT_FORWARD):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _with_forward(f"{name}.{child_name}" if name else child_name, child)


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(name, child) for name, child in module.named_children() if any(child.children())]
    counts = Counter(type(child) for _, child in children)
    for name, child in children:
        if counts[type(child)] > 1 and not isinstance(child, (*WITHOUT_FORWARD, nn.Sequential)):
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _large(module: nn.Module, prefix: str, limit: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, WITHOUT_FORWARD) or (
            nbytes_of(child) > limit and any(child.children())
        ):
            yield from _large(child, f"{prefix}{name}.", limit)
        elif nbytes_of(child):
            yield prefix + name, child


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())
