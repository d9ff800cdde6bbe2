"""Make a script that computes in float64 compute in float32, to measure what float64 costs.

Every way in which scripts usually ask for float64 gives float32. A script that asks in another way,
or that needs the range of float64, may fail; the experiment is then left out.
"""

import functools
from collections.abc import Callable
from typing import Any


def install(torch: Any) -> None:
    """Patch ``torch``; must precede the script's own use of it."""
    double, single = torch.float64, torch.float32
    torch.float64 = torch.double = single
    torch.Tensor.double, torch.nn.Module.double = torch.Tensor.float, torch.nn.Module.float
    for name in ("tensor", "as_tensor", "asarray", "from_numpy"):
        setattr(torch, name, _narrowed(getattr(torch, name), double, single))
    set_default = torch.set_default_dtype

    @functools.wraps(set_default)
    def set_default_dtype(dtype: Any) -> None:
        set_default(single if dtype == double else dtype)

    torch.set_default_dtype = set_default_dtype


def _narrowed(make: Callable[..., Any], double: Any, single: Any) -> Callable[..., Any]:
    @functools.wraps(make)
    def narrowed(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if made.dtype != double:
            return made
        return made.detach().to(single).requires_grad_(made.requires_grad)

    return narrowed
