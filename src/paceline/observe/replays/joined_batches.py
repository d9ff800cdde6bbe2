"""Join the batches of several ranks into one, also with their samples in another order."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ...record.hooks.batch_size import fields_of, samples_in
from ..facts.samples import BatchFacts, LoaderFacts
from ..generators import kept_generators

SampleKey = tuple[int, tuple[int, ...]]  # position in the dataset, and contents of a sample
CANNOT_JOIN = "batches of several ranks can't be joined"


def join_batches(batches: list[Any]) -> Any:
    """Return one batch with the samples of all, in order.

    Batches that are equal are one: each rank reads the global batch, and trains its part.

    Raises:
        ValueError: They can't be joined.
    """
    if all(_have_equal_tensors(batches[0], one) for one in batches[1:]):
        return batches[0]
    return _join(batches, [samples_in(one) for one in batches])


def collate_again(
    loader: Any, batches: list[Any], indices: list[list[int] | None], seed: int | None = None
) -> Any:
    """Return one batch with the samples of all, as the ``collate_fn`` of a loader makes it.

    Batches that are padded to their longest sample, and graphs that are joined to one, can't be
    joined by their tensors.

    Args:
        loader: The loader of one process.
        batches: Those of the ranks.
        indices: Positions of their samples in the dataset.
        seed: Of another order of the samples; None for that of the ranks.

    Raises:
        ValueError: Samples that are read again are not those of the batches.
    """
    try:
        with kept_generators(loader.dataset):
            for batch, rows in zip(batches, indices, strict=True):
                if not _have_equal_tensors(loader.collate_fn(_read(loader.dataset, rows)), batch):
                    raise ValueError("samples that are read again are others")
            every = [at for rows in indices for at in rows or ()]
            if seed is not None:
                every = [every[at] for at in _order(len(every), seed)]
            return loader.collate_fn(_read(loader.dataset, every))
    except Exception as error:  # of the user's code
        raise ValueError(f"they can't be made again ({type(error).__name__}: {error})") from error


def _read(dataset: Any, rows: list[int] | None) -> list[Any]:
    """Return samples of a dataset as a DataLoader reads them."""
    if rows is None:
        raise ValueError("the positions of the samples are not known")
    at_once = getattr(dataset, "__getitems__", None)
    return list(at_once(rows)) if at_once else [dataset[at] for at in rows]


def has_rows(batch: Any, indices: list[int] | None) -> bool:
    """Return whether the rows of a batch's tensors can be its samples."""
    return indices is None or samples_in(batch) == len(indices)


def permute_batch(batch: Any, seed: int) -> Any:
    """Return the batch with its samples in another order."""
    return select_samples(batch, _order(samples_in(batch), seed))


def _order(samples: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(
        samples, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return order


def select_samples(batch: Any, rows: list[int]) -> Any:
    """Return the samples at some positions of a batch, in this order.

    Raises:
        ValueError: It has an object of the script, such as a graph.
    """
    return _map(batch, samples_in(batch), lambda tensor: tensor[rows], rows)


def sample_keys(batch: BatchFacts, loader: LoaderFacts) -> list[SampleKey]:
    """Return a key of each sample; [] if samples can't be told apart."""
    contents = batch.by_sample or [()] * batch.samples
    positions = batch.indices
    if positions is None or len(positions) != batch.samples or len(contents) != batch.samples:
        return [(-1, one) for one in contents] if batch.contents else []
    if loader.subset is not None:
        positions = [loader.subset[at] for at in positions]
    return list(zip(positions, contents, strict=True))


def join_once(parts: list[tuple[Any, list[SampleKey]]], seen: set[SampleKey]) -> Any:
    """Join batches without the samples that were seen; None if none is left."""
    kept = []
    for batch, keys in parts:
        rows = []
        for row, key in enumerate(keys):
            if key not in seen or key[0] < 0:
                rows.append(row)
                seen.add(key)
        if not keys or len(rows) == len(keys):
            kept.append(batch)
        elif rows:
            kept.append(select_samples(batch, rows))
    kept = [one for one in kept if samples_in(one)]
    return join_batches(kept) if kept else None


def _join(values: list[Any], samples: list[int]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        if first.ndim and all(len(x) == n for x, n in zip(values, samples, strict=True)):
            if len({one.shape[1:] for one in values}) > 1:
                shapes = ", ".join(str(list(one.shape)) for one in values)
                raise ValueError(f"tensors of shapes {shapes}")
            return torch.cat(values)
    elif isinstance(first, Mapping):
        joined = {key: _join([one[key] for one in values], samples) for key in first}
        return _like(first, joined)
    elif isinstance(first, list | tuple):
        lengths = [len(one) for one in values]
        if _is_column(first) and lengths == samples:
            return _rebuilt(first, [item for one in values for item in one])
        if len(set(lengths)) == 1:
            items = [_join(list(one), samples) for one in zip(*values, strict=True)]
            return _rebuilt(first, items)
    if all(_is_equal(first, one) for one in values[1:]):
        return first
    raise ValueError(f"values of type {type(first).__name__}")


def _map(
    value: Any, samples: int, select: Callable[[torch.Tensor], torch.Tensor], order: list[int]
) -> Any:
    if isinstance(value, torch.Tensor):
        return select(value) if value.ndim and len(value) == samples else value
    if isinstance(value, Mapping):
        return _like(value, {k: _map(x, samples, select, order) for k, x in value.items()})
    if isinstance(value, list | tuple):
        if _is_column(value) and len(value) == samples:
            return _rebuilt(value, [value[at] for at in order])
        return _rebuilt(value, [_map(one, samples, select, order) for one in value])
    if fields_of(value):
        raise ValueError(f"values of type {type(value).__name__}")
    return value


def _is_column(values: Any) -> bool:
    """Return whether a list has one plain value for each sample, and not tensors."""
    return bool(values) and not any(isinstance(x, torch.Tensor | Mapping | list) for x in values)


def _like(first: Any, values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type."""
    if type(first) is dict:
        return values
    try:
        made: Any = type(first)(values)
    except TypeError:
        return values
    return made


def _rebuilt(first: Any, items: list[Any]) -> Any:
    if hasattr(first, "_fields"):  # a named tuple
        return type(first)(*items)
    return tuple(items) if isinstance(first, tuple) else items


def _have_equal_tensors(one: Any, other: Any) -> bool:
    """Return whether batches have equal tensors and plain values at the same places."""
    (leaves, made), (others, like) = tree_flatten(_plain(one)), tree_flatten(_plain(other))
    plain = torch.Tensor | str | int | float | None
    return made == like and all(
        isinstance(a, plain) and type(a) is type(b) and _is_equal(a, b)
        for a, b in zip(leaves, others, strict=True)
    )


def _plain(value: Any) -> Any:
    """Return a batch with dictionaries in place of other mappings, and of objects with tensors."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return _rebuilt(value, [_plain(one) for one in value])
    fields = fields_of(value)
    return {type(value): {key: _plain(one) for key, one in fields.items()}} if fields else value


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # of an object with tensors or arrays, which have no single truth value
        return False
