"""The command ``paceline convert``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..common.base import RUN, app, examples, exit_on_mistake
from ..common.command import Command, print_json
from ..common.options import Json, value_option


@app.command(
    cls=Command,
    rich_help_panel=RUN,
    short_help="Write a checkpoint's model to one file for other programs",
    epilog=examples(
        ("paceline convert run/ckpt model.safetensors", "the newest checkpoint"),
        ("paceline convert run/ckpt/step-00001200 model.pt", "for torch.load"),
        ("paceline convert dcp/ model.safetensors --prefix model.", "from PyTorch's own format"),
        ("paceline convert model.pt model.safetensors", "from one file to another"),
    ),
)
def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint (step-NNNNNNNN), a folder of checkpoints, of which the newest is "
            "used, a folder of torch.distributed.checkpoint, or a file: .safetensors, or .pt, "
            ".pth, .bin or .ckpt of torch.save.",
            show_default=False,
        ),
    ],
    dest: Annotated[
        Path, typer.Argument(help="New file: .safetensors, .pt or .pth.", show_default=False)
    ],
    model: Annotated[
        int | None,
        value_option(
            "Number of the model, in the order of world.distribute, from 0. Needed if there "
            "are several.",
            "N",
        ),
    ] = None,
    prefix: Annotated[
        str,
        value_option(
            "Only tensors whose names begin with this, which is removed from the names.", "TEXT"
        ),
    ] = "",
    json: Json = None,
) -> None:
    """Write the weights of a model, saved in any layout on any number of ranks, to one file.

    The names are those of the plain model's state_dict; in a file, names of nested dicts are joined
    by dots. All files of a checkpoint are verified before, and no code in them is executed. One
    process suffices; it holds one tensor at a time in memory for .safetensors.
    """
    with exit_on_mistake():
        from ...checkpoint.model_export import export_model

        report = export_model(checkpoint, dest, model, prefix)
        if json is not None:
            print_json({"file": str(dest), **asdict(report)}, json, name="paceline-convert")
            return
        step = "" if report.step is None else f" of step {report.step}"
        typer.echo(
            f"{dest}: {report.tensors} tensors, {report.elements:,} elements, "
            f"{report.bytes:,} bytes, from {report.checkpoint}{step}"
        )
        if report.left_out:
            typer.echo(f"left out (not tensors): {', '.join(report.left_out[:5])}", err=True)
