"""The blocks of a model: modules that are repeated, such as the layers of a transformer.

Activations are recomputed, and the parameters of sharded layouts gathered, block by block. In both
a block is a module whose class occurs several times among the children of one module, and that
consists of modules itself. They differ in the rest of the model:

| | ``recomputed_blocks`` | ``gathered_blocks`` |
| --- | --- | --- |
| repeated children of a ModuleList, ModuleDict or Sequential | blocks | blocks |
| repeated attributes of another module | blocks | as the rest |
| repeated Sequentials | what they contain | blocks |
| the rest | is not recomputed | is divided by size |

The rest of a sharded model is gathered as well, and a block costs a collective in forward and in
backward: so it is divided where that saves memory. Blocks of other sizes would change the order in
which gradients are summed, and with it the last bits of a training.
"""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

MAX_SHARE = 8  # a module with more than this fraction of the parameters' bytes is divided further
MIN_BLOCK_BYTES = 1 << 20  # of a block that is found by its size

WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)  # they have no forward
_CONTAINERS = (*WITHOUT_FORWARD, nn.Sequential)


def recomputed_blocks(
    model: nn.Module, names: Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """Return name and module of each block, in order of registration; no block contains another.

    Args:
        names: Names of modules or of classes. A container without a forward (ModuleList) stands
            for its children. None: the outermost repeated modules.

    Raises:
        ValueError: A name matches no module.
    """
    if names is not None:
        modules = dict(model.named_modules())
        named = named_blocks(model, names, "recomputed_blocks")
        chosen = [(name, modules[name]) for name in modules if name and name in named]
    else:
        chosen = list(_repeated(model, ""))
    inner = {id(part) for _, module in chosen for part in module.modules() if part is not module}
    unique = {id(module): (name, module) for name, module in reversed(chosen)}
    return [entry for key, entry in reversed(unique.items()) if key not in inner]


def gathered_blocks(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the modules whose parameters are gathered and scattered together.

    Inner ones come before those around them. The parameters outside of all blocks form one more
    block, that of the model.

    Args:
        names: As in ``recomputed_blocks``. None: repeated modules of containers, and large ones.

    Raises:
        ValueError: A name matches no module.
    """
    found = named_blocks(model, names) if names is not None else _repeated_and_large(model)
    modules = dict(model.named_modules())
    kept = [name for name in found if name and not _shares_parameters(model, modules[name])]
    return sorted(dict.fromkeys(kept), key=lambda name: -name.count("."))


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


def names_in(model: nn.Module, names: Sequence[str] | None) -> list[str] | None:
    """Return the names that match a module of ``model``, a part of the model that has all of them.

    None stays None.
    """
    if names is None:
        return None
    known = {text for n, m in model.named_modules() for text in (n, type(m).__name__)}
    return [name for name in ([names] if isinstance(names, str) else names) if name in known]


def _with_forward(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the module's name, or for a container without a forward those of its children."""
    if not isinstance(module, WITHOUT_FORWARD):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _with_forward(f"{name}.{child_name}" if name else child_name, child)


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated_classes(module)
    for name, child in module.named_children():
        if type(child) in repeated and not isinstance(child, _CONTAINERS):
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _repeated_and_large(model: nn.Module) -> list[str]:
    """Return the repeated modules of containers, and large ones among the others."""
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


def _repeated_classes(module: nn.Module) -> set[type]:
    """Return the classes of several children that consist of modules themselves."""
    counts = Counter(type(child) for child in module.children() if any(child.children()))
    return {kind for kind, count in counts.items() if count > 1}


def _shares_parameters(model: nn.Module, block: nn.Module) -> bool:
    """Return whether a module outside of the block has one of its parameters (tied weights).

    Such a parameter is needed whenever either of them runs, so it belongs to the model.
    """
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    outside = (module for module in model.modules() if id(module) not in inside)
    return any(id(p) in own for module in outside for p in module.parameters(recurse=False))


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())
