"""The YAML file of ``horovodrun --config-file``: parameters of Horovod's runtime."""

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ....security.files import InvalidFileError, read_regular

MAX_BYTES, MAX_DEPTH = 64 << 10, 8
_EXAMPLE = "params: {cycle_time_ms: 3}"
# The options of horovodrun for the values of each section; a switch has an option for true and one
# for false.
SECTIONS: dict[str, dict[str, str | tuple[str, str]]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    },
}


def read_config(path: Path) -> list[tuple[str, list[str]]]:
    """Return the options of horovodrun in a configuration file, with their values.

    Raises:
        ValueError: The file can't be read, or contains something unknown.
    """
    try:
        text = read_regular(path, MAX_BYTES)
    except (OSError, InvalidFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"--config-file {path} can't be read: {reason}. HINT: name a YAML file"
        ) from None
    return list(_options(path, _parsed(path, text)))


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ValueError(
            f"--config-file {path} needs a YAML parser. HINT: pip install pyyaml, or write the "
            "values as options"
        ) from None
    try:
        flaw = _flaw_of_structure(yaml.parse(text), yaml)
        tree = None if flaw else yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise ValueError(f"{path}{line} is not YAML. HINT: correct this line") from None
    except ValueError as error:  # a date or a number that does not exist
        raise ValueError(
            f"{path} contains an invalid value: {error!s:.80}. HINT: {_EXAMPLE}"
        ) from None
    if flaw:
        raise ValueError(f"{path} {flaw}. HINT: write single values, as in {_EXAMPLE}")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} has no sections. HINT: {', '.join(SECTIONS)}")
    return tree


def _flaw_of_structure(events: Iterable[Any], yaml: Any) -> str:
    """Return why a file may need far more memory than its text, or ""."""
    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            return "contains an alias"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return f"has more than {MAX_DEPTH} levels"
    return ""


def _text(path: Path, name: str, value: Any) -> str:
    """Return a value as an option has it."""
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(
        f"{path}: {name} is a {type(value).__name__}, and not a single value. HINT: {_EXAMPLE}"
    )


def _options(path: Path, tree: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    controller = tree.pop("controller", None)
    if controller is not None:
        is_mpi = _text(path, "controller", controller).lower() == "mpi"
        yield ("--mpi" if is_mpi else "--gloo"), []
    for section, values in tree.items():
        known = SECTIONS.get(section)
        if known is None or not isinstance(values, dict):
            raise ValueError(
                f"{path}: unknown section {section!s:.40}. HINT: {', '.join(SECTIONS)}"
            )
        for name, value in values.items():
            option = known.get(name)
            if option is None:
                raise ValueError(f"{path}: {section} has no {name!s:.40}. HINT: {', '.join(known)}")
            if isinstance(option, tuple):
                yield option[0 if value else 1], []
            elif value is not None:
                yield option, [_text(path, name, value)]
