"""The inputs and outputs of an exported model: names, shapes with symbolic sizes, dtype, units."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..security.schema import read_json

Size = int | str  # a fixed size, or the name of a symbolic one

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEFAULT_BOUNDS = (1, 1 << 24)
MAX_SIZE = 1 << 40
MAX_SYMBOLS = 8
MAX_RANK = 8
MAX_TENSORS = 32
MAX_FIELDS_FILE_BYTES = 16 << 20
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,62}")
INTEGERS = (
    "HINT: pass indices and masks as float32 or float64, and let the model convert them: "
    "self.embedding(x.long()), (mask > 0)"
)
_INPUT = re.compile(r"\s*(?P<name>[^:\s]+)\s*:\s*(?P<dtype>\w+)\s*\[(?P<shape>[^\]]*)\]\s*")
_BOUND = re.compile(r"\s*([^=\s]+)\s*=\s*(\d+)\s*:\s*(\d+)\s*")


@dataclass(frozen=True)
class FieldValues:
    """What a solver's array means: the unit, and the normalisation that the model was trained with.

    Attributes:
        unit: Any text.
        mean, std: One number, or one for each element of the last dimension (of the second one, the
            channels, where there are more than two). The model is given (x - mean) / std; an output
            is its result * std + mean.
    """

    unit: str = ""
    mean: list[float] | float | None = None
    std: list[float] | float | None = None


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of the model."""

    name: str
    shape: tuple[Size, ...]
    values: FieldValues = field(default_factory=FieldValues)

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with the symbolic sizes replaced."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """Inputs, outputs and bounds of an exported model.

    Attributes:
        dtype: "float32" or "float64", of all inputs and outputs.
        bounds: Least and largest value of each symbolic size.
    """

    dtype: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    bounds: dict[str, tuple[int, int]]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def parse_input(text: str) -> tuple[str, TensorSpec]:
    """Return dtype and specification of ``x: float64[batch,6]``. Raises ValueError."""
    hint = "HINT: --input 'x: float64[batch,6]'"
    match = _INPUT.fullmatch(text)
    if match is None:
        raise ValueError(f"--input {text!r} is not NAME: DTYPE[SIZE,...]. {hint}")
    name, dtype = match["name"], match["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"--input {text!r}: the dtype must be float32 or float64. {INTEGERS}")
    _check_name(name, f"--input {text!r}")
    shape: list[Size] = []
    for word in filter(None, (word.strip() for word in match["shape"].split(","))):
        if word.isdigit():
            if not 1 <= int(word) <= MAX_SIZE:
                raise ValueError(f"--input {text!r}: a size must be 1 or larger. {hint}")
            shape.append(int(word))
        else:
            _check_name(word, f"--input {text!r}")
            shape.append(word)
    if not 1 <= len(shape) <= MAX_RANK:
        raise ValueError(f"--input {text!r} must have 1 to {MAX_RANK} sizes. {hint}")
    return dtype, TensorSpec(name, tuple(shape))


def parse_bound(text: str) -> tuple[str, tuple[int, int]]:
    """Return the name and the bounds of ``batch=1:4096``. Raises ValueError."""
    match = _BOUND.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_SIZE:
        raise ValueError(f"--bound {text!r} is not NAME=MIN:MAX. HINT: --bound batch=1:4096")
    return match[1], (int(match[2]), int(match[3]))


def _check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{where}: {name!r} is not a name. HINT: letters, digits and _, at most 63 characters"
        )


def inputs_of_examples(examples: Sequence[torch.Tensor]) -> tuple[str, tuple[TensorSpec, ...]]:
    """Return dtype and specification of example inputs, whose first dimension is the batch."""
    dtypes = {str(example.dtype).removeprefix("torch.") for example in examples}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"example inputs have the dtypes {', '.join(sorted(dtypes))}; all must be float32, or "
            f"all float64. {INTEGERS}"
        )
    if any(example.dim() < 1 for example in examples):
        raise ValueError("an example input has no dimension. HINT: its first one must be the batch")
    many = len(examples) > 1
    specs = tuple(
        TensorSpec(f"x{i}" if many else "x", ("batch", *example.shape[1:]))
        for i, example in enumerate(examples)
    )
    return dtypes.pop(), specs


def input_of_first_linear(module: torch.nn.Module) -> tuple[str, tuple[TensorSpec, ...]]:
    """Return dtype and specification of the input of a model that begins with a linear layer.

    Raises:
        ValueError: The first layer with parameters is another one.
    """
    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is None:
            continue
        dtype = str(next(layer.parameters(recurse=False)).dtype).removeprefix("torch.")
        if isinstance(layer, torch.nn.Linear) and dtype in DTYPES:
            return dtype, (TensorSpec("x", ("batch", layer.in_features)),)
        break
    raise ValueError(
        "the shape of the input is not known, as the model does not begin with a linear layer of "
        "float32 or float64. HINT: --input 'x: float32[batch,3,64,64]', or let the function of "
        "--model return (model, example_input)"
    )


def choose_inputs(
    given: Sequence[tuple[str, TensorSpec]],
    examples: Sequence[torch.Tensor],
    module: torch.nn.Module,
) -> tuple[str, tuple[TensorSpec, ...]]:
    """Return dtype and inputs: as given, else of the examples, else of a first linear layer.

    Raises:
        ValueError: They contradict each other, or are not known.
    """
    if not given:
        return inputs_of_examples(examples) if examples else input_of_first_linear(module)
    dtypes = {dtype for dtype, _ in given}
    names = [spec.name for _, spec in given]
    if len(dtypes) > 1 or len(set(names)) < len(names):
        raise ValueError(
            "all inputs must have one dtype, and names of their own. HINT: --input 'x: "
            "float64[batch,6]' --input 'y: float64[batch,2]'"
        )
    if examples and len(examples) != len(given):
        raise ValueError(
            f"--input is given {len(given)} times, and the function of --model returns "
            f"{len(examples)} example inputs. HINT: one --input for each"
        )
    return dtypes.pop(), tuple(spec for _, spec in given)


def read_fields(path: Path) -> dict[str, FieldValues]:
    """Return units and normalisation by the names of inputs and outputs, from a JSON file.

    Raises:
        InvalidFileError: The file is not {"x": {"unit": "K", "mean": [..], "std": [..]}}.
        OSError: It can't be read.
    """
    return read_json(path, dict[str, FieldValues], MAX_FIELDS_FILE_BYTES)


def normalisation(
    values: FieldValues, spec: TensorSpec, kind: str
) -> tuple[torch.Tensor, ...] | None:
    """Return mean and standard deviation as tensors that broadcast to the array; None without.

    Raises:
        ValueError: A number is not finite, a standard deviation is 0, or there are too many.
    """
    if values.mean is None and values.std is None:
        return None
    axis = -1 if len(spec.shape) <= 2 else 1
    size = spec.shape[axis] if len(spec.shape) > 1 else None
    pair = []
    for name, given, default in (("mean", values.mean, 0.0), ("std", values.std, 1.0)):
        numbers = (
            [default] if given is None else given if isinstance(given, list | tuple) else [given]
        )
        if len(numbers) not in (1, size) or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"{kind} {spec.name}: {name} has {len(numbers)} numbers, which must be finite; "
                f"HINT: give 1 number{f', or {size}' if isinstance(size, int) else ''}"
            )
        shape = [1] * len(spec.shape)
        if len(numbers) > 1:
            shape[axis] = len(numbers)
        pair.append(torch.tensor(numbers, dtype=torch.float64).reshape(shape))
    if not pair[1].ne(0).all():
        raise ValueError(f"{kind} {spec.name}: std is 0. HINT: leave that feature out, or use 1")
    return tuple(pair)


def spec_json(spec: TensorSpec, dtype: str) -> dict[str, Any]:
    """Return the part of the manifest that describes an input or output."""
    values = spec.values
    extra = {"unit": values.unit} if values.unit else {}
    if values.mean is not None or values.std is not None:
        extra |= {"mean": values.mean, "std": values.std}  # type: ignore[dict-item]
    return {"name": spec.name, "dtype": dtype, "shape": list(spec.shape), **extra}
