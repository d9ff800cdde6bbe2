"""Attributes in which a forward keeps tensors with gradients, on stages that do not run it."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import nn

from .stage_plan import ForwardPlan


class KeptByAnotherStage:
    """Stands for a tensor that another stage has; each use of it is an error.

    One process has the tensor, and a loss that reads it would silently leave it out otherwise.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"pipeline: the forward keeps {self.name} as an attribute, and another stage runs it: "
            "this rank does not have it. HINT: return it from the forward, if the loss uses it"
        )

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # Python asks for what it may use, such as __deepcopy__
            raise AttributeError(key)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        found = next(one for one in _leaves(given) if isinstance(one, cls))
        found._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
    __float__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree


def mark_kept(
    model: nn.Module,
    kept: Mapping[str, Any],
    atoms: Iterable[str],
    plan: ForwardPlan,
    stages: Iterable[int],
) -> None:
    """Replace attributes that other stages keep, and that are None here.

    Args:
        kept: What the attributes were before the forward, by name.
        atoms: Names of the modules that are not divided.
        stages: The virtual stages of this rank.
    """
    own = {event.target for stage in stages for _, event in plan.stages[stage].events}
    run_here = [f"{name}." for name in atoms if name in own]
    for name, before in kept.items():
        owner, _, key = name.rpartition(".")
        if before is None and not any(name.startswith(prefix) for prefix in run_here):
            setattr(model.get_submodule(owner), key, KeptByAnotherStage(name))
