"""The command ``paceline export``."""

import ast
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...security.processes import import_folders
from ..common.base import RUN, app, examples, exit_on_mistake, say
from ..common.command import Command, print_json, with_options
from ..common.options import Json, output_option, value_option

if TYPE_CHECKING:  # it imports torch
    from ...deploy.export import ExportResult


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of ``paceline export``, as typed."""

    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Weights: a checkpoint (step-NNNNNNNN), a folder of checkpoints, of which the "
            "newest is used, a folder of torch.distributed.checkpoint, or a file: .safetensors, or "
            ".pt, .pth, .bin or .ckpt of torch.save. Without it, the weights that the function "
            "of --model gives.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str,
        value_option(
            "Function that returns the module, or (module, example input, ...): "
            "MODULE:FUNCTION or SCRIPT.py:FUNCTION. Arguments may follow: 'net:build(81, 9)'.",
            "MODULE:FUNCTION",
        ),
    ] = ""
    out: Annotated[Path, output_option("New file.", show_default=True)] = Path("model.paceline")
    input: Annotated[
        list[str] | None,
        value_option(
            "Name, dtype and shape of an input: 'x: float64[batch,6]'. A name in place of a "
            "size is a symbolic size. May be repeated. Without it: from the example inputs of the "
            "function, else from a first linear layer.",
            "SPEC",
        ),
    ] = None
    bound: Annotated[
        list[str] | None,
        value_option(
            "Least and largest value of a symbolic size: batch=1:4096. May be repeated. "
            "Default: 1 to 16,777,216.",
            "NAME=MIN:MAX",
        ),
    ] = None
    fields: Annotated[
        Path | None,
        value_option(
            'JSON file with units and normalisation: {"x": {"unit": "K", "mean": [...], '
            '"std": [...]}, "y": {...}}. The exported model takes and returns values in these '
            "units.",
            "FILE",
        ),
    ] = None
    backend: Annotated[
        list[str] | None,
        value_option(
            "Backend to try: builtin, onnxruntime or aotinductor. May be repeated. Default: "
            "all. The fastest one within the tolerance is kept.",
            "NAME",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        value_option(
            "Largest error of the test vectors, relative to the largest output. Default: 1e-6 "
            "for float32, 1e-13 for float64.",
            "NUMBER",
        ),
    ] = None
    number: Annotated[
        int | None,
        value_option(
            "Number of the model in the checkpoint, in the order of world.distribute, from 0.", "N"
        ),
    ] = None
    prefix: Annotated[
        str,
        value_option(
            "Only tensors whose names begin with this, which is removed from the names.", "TEXT"
        ),
    ] = ""
    show_build_flags: Annotated[
        str,
        value_option(
            "Print flags for the compiler and exit: c, c++, fortran; or prefix, the folder of "
            "the library, headers, pkg-config and CMake files.",
            "LANGUAGE",
        ),
    ] = ""
    copy_runtime: Annotated[
        Path | None,
        value_option(
            "Copy the library, headers and its C source to a new folder and exit, for systems "
            "without Python.",
            "FOLDER",
        ),
    ] = None
    json: Json = None


@app.command(
    cls=Command,
    rich_help_panel=RUN,
    short_help="Write a trained model to a file that C, C++ and Fortran programs call",
    epilog=examples(
        ("paceline export run/ckpt --model net:build", "the newest checkpoint"),
        ("paceline export run/ckpt --model 'net:build(81, 9)' --input 'x: float64[batch,81]'", ""),
        (
            "paceline export model.pt --model net:build --fields units.json --out closure.paceline",
            "",
        ),
        ("paceline export --show-build-flags fortran", "for gfortran solver.f90 ..."),
    ),
)
@with_options
def export(options: ExportOptions) -> None:
    """Write a trained model to one file that programs in C, C++ and Fortran call, without Python.

    The model is tried with every backend that can express it: builtin (MLPs and small CNNs, needs
    nothing), onnxruntime, and aotinductor (compiled code, needs the same PyTorch). Error and speed
    of each are printed beside eager PyTorch with one thread, and the best one within the tolerance
    is kept. A model in float64 is computed in float64.

    docs/how-to/run/export.md has programs in C, C++ and Fortran.
    """
    with exit_on_mistake():
        if options.show_build_flags or options.copy_runtime is not None:
            _show_runtime(options.show_build_flags, options.copy_runtime)
            return
        result = _export(options)
        if options.json is not None:
            print_json(asdict(result), options.json, name="paceline-export")
            return
        typer.echo("\n".join(result_lines(result)))


def _show_runtime(language: str, folder: Path | None) -> None:
    from ...deploy import native_model as build_flags

    if folder is not None:
        build_flags.copy_runtime(folder)
        typer.echo(f"{folder}: lib/libpaceline.so, include/, fortran/, src/, build.sh")
        return
    typer.echo(build_flags.build_flags(language))


def _export(options: ExportOptions) -> "ExportResult":
    name, out = options.model, options.out
    checkpoint, tolerance = options.checkpoint, options.tolerance
    if not name:
        raise ValueError(
            "--model is missing. HINT: --model MODULE:FUNCTION that returns the module"
        )
    if out.exists():
        raise ValueError(f"{out} exists. HINT: remove it, or choose another name by --out")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(f"--tolerance {tolerance} must be between 0 and 1. HINT: --tolerance 1e-5")
    if checkpoint is None and (options.number is not None or options.prefix):
        raise ValueError("--number and --prefix choose weights of a checkpoint. HINT: name one")
    from ...deploy import specification
    from ...deploy.export import BACKENDS, export_model

    inputs = [specification.parse_input(text) for text in options.input or []]
    bounds = dict(specification.parse_bound(text) for text in options.bound or [])
    fields = specification.read_fields(options.fields) if options.fields is not None else None
    module, example_inputs = build_model(name)
    about: dict[str, Any] = {"model": name}
    if checkpoint is not None:
        about |= load_weights(module, checkpoint, options.number, options.prefix)
    dtype, specs = specification.choose_inputs(inputs, example_inputs, module)
    return export_model(
        module,
        specs,
        dtype,
        out,
        examples=example_inputs,
        bounds=bounds,
        fields=fields,
        backends=options.backend or BACKENDS,
        tolerance=tolerance,
        about=about,
        say=lambda text: say(f"{text} ..."),
    )


def build_model(name: str) -> tuple[Any, Sequence[Any]]:
    """Call the function of --model. Return the module and its example inputs. Raises ValueError."""
    import torch

    from ...data.sources.open_source import import_function

    function, bracket, rest = name.partition("(")
    arguments: Sequence[Any] = ()
    if bracket:
        values = rest.rstrip().removesuffix(")")
        try:
            arguments = ast.literal_eval(f"({values},)") if values.strip(" )") else ()
        except (ValueError, SyntaxError):
            raise ValueError(
                f"--model {name}: the arguments must be numbers, texts or lists. HINT: --model "
                f"'{function}(81, 9)'"
            ) from None
    file, colon, attribute = function.rpartition(":")
    if file.endswith(".py"):  # a script: its folder is the first on the search path, as for python
        sys.path[:] = import_folders(str(Path(file).resolve().parent))
        function = f"{Path(file).stem}{colon}{attribute}"
    found = import_function(function, "--model")
    try:
        made = found(*arguments)
    except TypeError as error:
        raise ValueError(f"--model {name}: {error}. HINT: --model '{function}(81, 9)'") from None
    module, *given = made if isinstance(made, tuple) else (made,)
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = list(given[0])
    if not isinstance(module, torch.nn.Module) or not all(
        isinstance(x, torch.Tensor) for x in given
    ):
        raise ValueError(
            f"--model {name} returned {type(made).__name__}. HINT: return the module, or (module, "
            "example_input)"
        )
    return module, given


def load_weights(module: Any, checkpoint: Path, number: int | None, prefix: str) -> dict[str, Any]:
    """Load the weights of a checkpoint into a module. Return what the manifest says about them."""
    from ...checkpoint.model_export import load_model_state

    folder, step, state = load_model_state(checkpoint, number, prefix)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:1500]
        raise ValueError(
            f"{folder} does not fit the module of --model: {reason} HINT: --prefix removes the "
            "beginning of names; arguments of the function: --model 'net:build(81, 9)'"
        ) from None
    return {"checkpoint": folder.name, "step": step}


def result_lines(result: "ExportResult") -> list[str]:
    """Return the lines that describe an export."""
    heads = [
        ", ".join(f"{name} {size:,}" for name, size in sizes.items()) or "fixed"
        for sizes in result.batches
    ]
    width = max(12, *(len(head) + 2 for head in heads))
    lines = [f"{'':14}{'error':>9}" + "".join(f"{head:>{width}}" for head in heads)]
    eager_error = f"{result.eager_error:.1e}" if result.eager_error else ""
    rows = [("eager PyTorch", eager_error, result.eager_s)]
    rows += [(c.name, f"{c.error:.1e}", c.call_s) for c in result.candidates if not c.reason]
    for name, error, seconds in rows:
        lines.append(
            f"{name:14}{error:>9}" + "".join(f"{1e6 * s:>{width - 3},.1f} us" for s in seconds)
        )
    rounding = "; that of eager PyTorch is its rounding error in float32, from float64"
    lines.append(
        f"errors relative to the largest output, tolerance {result.tolerance:.1e}"
        f"{rounding if result.eager_error else ''}"
    )
    lines += [f"{c.name:14} not used: {c.reason}" for c in result.candidates if c.reason]
    for kind, values in (("input", result.inputs), ("output", result.outputs)):
        for value in values:
            shape = ",".join(map(str, value["shape"]))
            unit = f" in {value['unit']}" if "unit" in value else ""
            lines.append(f"{kind:14} {value['name']}: {result.dtype}[{shape}]{unit}")
    lines.append(
        f"{result.file}: {result.bytes:,} bytes, backend {result.backend}; needs {result.needs}"
    )
    return lines + [f"to find it here: export {result.setting}"] * bool(result.setting)
