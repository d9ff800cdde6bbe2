"""Cases of the battery: right scripts, and edits or whole scripts that plant one mistake each.

A case's text marks the lines that are to blame with a comment ``# <mistake>`` at their end. The
comment is removed before the script is run; a finding has the right line if it names one of them,
or the line before or after it.
"""

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
HALVES = {
    "open": (HERE / "open_half", HERE / "first_kept_out", HERE / "second_kept_out"),
    "kept-out": (HERE / "kept_out",),
}
MARK = re.compile(r"[ \t]*# <mistake>[ \t]*$")


@dataclass(frozen=True)
class Script:
    """A right script.

    Attributes:
        batch: Option or environment variable of the batch size of a rank; "" if it has another
            option for the batch of all ranks.
        size: Default of that batch size.
        equal: Whether N ranks print what one process prints at the same global batch; False for
            scripts with random numbers of each rank.
        arguments: Arguments with which the script is verified.
        exact: Further arguments with which N ranks print what one process prints.
    """

    batch: str
    size: int = 0
    equal: bool = True
    arguments: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()


# Accelerate draws another order of samples on one process than on several: without shuffling, its
# scripts print the same on both.
SCRIPTS = {
    "bytes_fsdp": Script(""),
    "cells_unet": Script("--batch-size", 4),
    "charlm_resume": Script("--batch_size", 4),
    "classify_trainer": Script("BATCH", 8),
    "clicks_stream": Script("--batch", 12),
    "cnn_ddp": Script("--batch-size", 8, arguments=("--epochs", "5")),
    "contrastive": Script("--batch-size", 8),
    "denoise_plateau": Script("--images-per-rank", 6),
    "encoder_fsdp": Script("--bs", 4),
    "fit_lbfgs": Script(""),
    "flow_surrogate": Script("--batch-size", 8, exact=("--noise", "0")),
    "forecast_world": Script(""),
    "gan": Script("--batch", 16, equal=False),
    "images_lightning": Script("BATCH_SIZE", 8),
    "keywords_ema": Script("--batch-size", 8, exact=("--dropout", "0", "--precision", "fp32")),
    "links_graph": Script("--batch-size", 32),
    "lm_accumulate": Script("--micro-batch", 4),
    "masked_trainer": Script("BATCH", 8),
    "mixer_dcp": Script("--batch-size", 8),
    "mlp_fsdp": Script("--batch", 8, arguments=("--lr", "1e-3")),
    "molecules_accelerate": Script("--per_device_train_batch_size", 4),
    "molecules_func": Script(""),
    "motion_fabric": Script("PER_RANK", 8),
    "own_each": Script("BATCH_SIZE", 10),
    "own_flat": Script("--batch", 8),
    "parts_ddp": Script(""),
    "pendulum_ppo": Script(""),
    "pulse_lightning": Script("BATCH_SIZE", 8),
    "rainfall_ddp": Script(""),
    "regress_resume": Script("--batch-size", 8),
    "resnet_ddp": Script("--batch-size", 8, exact=("--no-augment",)),
    "segment_accelerate": Script("--batch_size", 4, equal=False),
    "sets_accelerate": Script(""),
    "spectra_lightning": Script(""),
    "speech_buckets": Script("--batch-size", 8, exact=("--time-mask", "0")),
    "stream_iterable": Script("BATCH", 8),
    "stream_workers": Script("BATCH", 8, equal=False),
    "tabular_lightning": Script("BATCH_SIZE", 8),
    "tagger_flat": Script(""),
    "tagger_trainer": Script("TRAIN_BATCH", 8),
    "teacher_ddp": Script("--batch", 8, equal=False),
    "text_accelerate": Script("--per_device_batch", 8, equal=False),
    "translate_accumulate": Script("BATCH", 4),
    "vae_dropout": Script("BATCH_SIZE", 8, equal=False),
    "world_images": Script("", equal=False),
    "world_tabular": Script(""),
}


@dataclass(frozen=True)
class Planted:
    """A script with one planted mistake.

    Attributes:
        kind: Id of the mistake.
        way: Name of this way to make it.
        script: Name of the right script that is edited; "" if ``source`` is a whole script.
        edits: Old text, which the script has once, and new text.
        source: A whole script.
        names: Ids that name this mistake as rightly as ``kind`` does.
        true: Further ids that are true of this script, as consequences of the mistake; ids in
            kinds.CONSEQUENCES need not be repeated.
        arguments: Arguments of the script; None for those of the right script.
        ranks: Number of ranks to verify with.
    """

    kind: str
    way: str
    script: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    source: str = ""
    names: tuple[str, ...] = ()
    true: tuple[str, ...] = ()
    arguments: tuple[str, ...] | None = None
    ranks: int = 2

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.way}"

    def text(self) -> str:
        """Return the script with its marks.

        Raises:
            ValueError: An old text is not there exactly once, or no line is marked.
        """
        text = self.source or path_of(self.script).read_text()
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {text.count(old)} times in the script: {old!r}")
            text = text.replace(old, new)
        if not any(MARK.search(line) for line in text.splitlines()):
            raise ValueError(f"{self.name}: no line is marked. HINT: # <mistake> at its end")
        return text

    @property
    def words(self) -> tuple[str, ...]:
        if self.arguments is not None or not self.script:
            return self.arguments or ()
        return SCRIPTS[self.script].arguments


@dataclass(frozen=True)
class Built:
    """A script as it is run: its text without marks, and the numbers of the marked lines."""

    text: str
    lines: frozenset[int] = field(default_factory=frozenset)


def strip(text: str) -> Built:
    """Remove the marks of a text."""
    rows = text.splitlines()
    marked = frozenset(at for at, row in enumerate(rows, 1) if MARK.search(row))
    return Built("\n".join(MARK.sub("", row) for row in rows) + "\n", marked)


def path_of(script: str) -> Path:
    """Return the path of a right script, in whichever half it is."""
    folders = (folder for half in HALVES.values() for folder in half)
    (found,) = (path for folder in folders for path in folder.glob(f"scripts/{script}.py"))
    return found


def right_scripts(half: str) -> list[str]:
    """Return the names of the right scripts of "open" or "kept-out"."""
    return sorted(path.stem for folder in HALVES[half] for path in folder.glob("scripts/*.py"))


def planted(half: str) -> list[Planted]:
    """Return the planted mistakes of "open" or "kept-out".

    Raises:
        ValueError: A mistake is there twice.
    """
    found: dict[str, Planted] = {}
    for path in (path for folder in HALVES[half] for path in sorted(folder.glob("*.py"))):
        name = f"{path.parent.name}_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for one in module.CASES:
            if one.name in found:
                raise ValueError(f"{one.name} is there twice")
            found[one.name] = one
    return list(found.values())
