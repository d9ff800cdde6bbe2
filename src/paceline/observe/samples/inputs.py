"""Observe batches that no DataLoader returns: the inputs of models.

Scripts that index tensors themselves have no loader, or one for the training only. The batches of a
loader may also be kept and trained again (``itertools.cycle``, a list of all batches).
"""

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...record.hooks.batch_size import samples_in
from ..facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from ..observation import Observation
from ..optimization.models import Model, Models
from ..user_lines import place, user_line, users_frames
from .contents import row_checksums, sample_checksums
from .loaders import Loaders
from .sampler_lines import SHUFFLES

# The loops of the script that run now, and what shuffles in them


def shuffle_line() -> str:
    """Return the line that shuffles in a loop which runs now; "" if there is none.

    The loops are those of the script's functions on this thread's stack.
    """
    for file, loop in _loops():
        for node in ast.walk(loop):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in SHUFFLES:
                    return place(file, node.lineno)
    return ""


def loop_line() -> str:
    """Return the line of the innermost ``for`` loop of the script that runs now; "" without one."""
    return next((place(file, loop.lineno) for file, loop in _loops()), "")


def _loops() -> Iterator[tuple[str, ast.For]]:
    """Yield the loops of the script that run now, the innermost first, with their files."""
    for frame in users_frames():
        file, line = frame.f_code.co_filename, frame.f_lineno
        loops = [
            node
            for node in _nodes(file)
            if isinstance(node, ast.For)
            and frame.f_code.co_firstlineno <= node.lineno
            and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        ]
        yield from ((file, loop) for loop in sorted(loops, key=lambda node: -node.lineno))


@lru_cache(maxsize=64)
def _nodes(file: str) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree; none if it has no Python source."""
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return []


MAX_BATCHES = 256  # of the training, and as many of evaluations
LEAST_STEPS = 2  # after the end of a loader, from which on its batches are trained again


class Inputs:
    """The inputs of forwards before which no loader was read.

    They count as batches of a loader without a dataset, whose indices are not known. There is one
    for the training, and one for each line that evaluates.

    Args:
        observation: Receives the facts.
        models: Know the inputs.
        loaders: Know whether there is a loader.
    """

    def __init__(self, observation: Observation, models: Models, loaders: Loaders) -> None:
        self._observation, self._models, self._loaders = observation, models, loaders
        self._training: LoaderFacts | None = None
        # The tensors of the first training forward, until those that hold samples are known.
        self._first: list[torch.Tensor] | None = None
        self._positions: list[int] | None = None
        self._parts: tuple[int, set[int]] | None = None  # a batch, and its samples that are trained
        self._evaluations: dict[str, LoaderFacts] = {}  # by line
        self._trained = self._evaluated = 0  # batches

    def before_forward(self, model: Model, is_training: bool) -> None:
        """Add the inputs of a forward as a batch."""
        if is_training:
            if not self._trains_without_loader():
                self._note_part()
            elif self._trained < MAX_BATCHES:
                self._add_trained()
        elif self._is_evaluated(model):
            self._add_evaluated()

    def _note_part(self) -> None:
        """Note which samples of the last batch a forward gets: all ranks may read the same batch,
        and each trains a part of it.
        """
        observation = self._observation
        read = observation.unassigned or observation.last_batches
        if not read:
            return
        at = read[-1]
        if self._parts is None or self._parts[0] != at:
            self._parts = (at, set())
        batch, rows = observation.facts.batches[at], self._parts[1]
        are_rows = batch.indices is None or len(batch.indices) == batch.samples
        if len(rows) == batch.samples or not are_rows:
            return
        given = [one for one in _tensors(self._models.inputs)[:1] if len(one) < batch.samples]
        checksums = [checksum for one in given for checksum in row_checksums(one)]
        columns = [{one: row for row, one in enumerate(x)} for x in batch.contents]
        found = next((x for x in columns if all(one in x for one in checksums)), None)
        if checksums and found is not None:
            rows.update(found[one] for one in checksums)
        else:
            rows.update(range(batch.samples))
        batch.rows = sorted(rows) if len(rows) < batch.samples else []

    def _trains_without_loader(self) -> bool:
        loaders = self._loaders
        if not loaders.has_batches:
            return True
        ended = loaders.ended_at_step
        return ended is not None and self._observation.step >= ended + LEAST_STEPS

    def _is_evaluated(self, model: Model) -> bool:
        """Return whether a forward without gradient evaluates samples that are of no loader.

        A model that computes targets of the training does so after a batch was read.
        """
        module, last = model.module(), self._loaders.last
        is_of_loader = last is not None and last.facts.phase is not Phase.TRAINING
        return (
            module is not None
            and not module.training
            and not is_of_loader
            and not self._observation.unassigned
        )

    def _add_trained(self) -> None:
        if self._training is None:
            line = user_line()
            self._training = self._new_loader(loop_line() or line)
            self._training.passes.append(
                PassFacts(0, Phase.TRAINING, line, None, 0, None, False, 0)
            )
        self._find_samples()
        if (added := self._add(self._training)) is not None:
            self._trained += 1
            self._observation.unassigned.append(added)

    def _find_samples(self) -> None:
        """Find the inputs that hold samples: those that change, if others do not (a graph)."""
        tensors = _tensors(self._models.inputs)
        if self._positions is not None:
            return
        if self._first is None:
            self._first = [one.detach().clone() for one in tensors]
            return
        pairs = list(zip(self._first, tensors, strict=False))
        self._positions = [at for at, (a, b) in enumerate(pairs) if not _are_equal(a, b)]
        first, self._first = self._first, None
        if self._positions and self._training is not None:
            key = self._training.key
            batch = next(x for x in self._observation.facts.batches if x.loader == key)
            batch.samples, batch.contents = self._samples(first)

    def _samples(self, tensors: list[torch.Tensor]) -> tuple[int, list[list[int]]]:
        """Return the number of samples of inputs, and their checksums."""
        if self._positions:
            tensors = [tensors[at] for at in self._positions if at < len(tensors)]
        samples = samples_in(tensors) if tensors else 0
        return samples, sample_checksums(tensors, samples) if samples else []

    def _add_evaluated(self) -> None:
        line, step = user_line(), self._observation.step
        loader = self._evaluations.get(line)
        if loader is None:
            loader = self._evaluations[line] = self._new_loader(loop_line() or line)
        passes = loader.passes
        if not passes or passes[-1].first_step != step:
            passes.append(PassFacts(len(passes), Phase.EVALUATION, line, None, 0, None, True, step))
        if self._evaluated >= MAX_BATCHES:
            passes[-1].is_complete = False
        elif self._add(loader) is not None:
            self._evaluated += 1
            self._observation.phase = Phase.EVALUATION

    def _add(self, loader: LoaderFacts) -> int | None:
        """Add the inputs to the loader's last pass; return their number, or None without any."""
        samples, contents = self._samples(_tensors(self._models.inputs))
        if not contents or self._is_known(loader, contents):
            return None
        one = loader.passes[-1]
        batch = BatchFacts(
            loader=loader.key,
            pass_number=one.number,
            number=one.batches,
            samples=samples,
            indices=None,
            contents=contents,
            step=self._observation.step,
        )
        one.batches += 1
        return self._observation.add_batch(batch)

    def _is_known(self, loader: LoaderFacts, contents: list[list[int]]) -> bool:
        """Return whether another model, or this one, got the same samples in the same step."""
        every = self._observation.facts.batches
        earlier = [every[at] for at in self._observation.unassigned]
        return any(
            one.loader == loader.key and any(column in one.contents for column in contents)
            for one in earlier
        )

    def _new_loader(self, line: str) -> LoaderFacts:
        loader = LoaderFacts(
            key=len(self._observation.facts.loaders),
            line=line,
            dataset="",
            dataset_length=None,
            dataset_checksum=0,
            is_iterable=True,
            batch_size=None,
            sampler="",
            sampler_has_epoch=False,
            drops_last=False,
            workers=0,
            sampler_seed_line=shuffle_line() if torch.is_grad_enabled() else "",
        )
        self._observation.facts.loaders.append(loader)
        return loader


def _tensors(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors of inputs whose rows can be compared; no sparse or sharded ones."""
    every = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
    return [one for one in every if one.ndim and _is_plain(one)]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_whole = not hasattr(tensor, "placements") and not tensor.is_nested
    return is_whole and not tensor.is_meta and tensor.layout == torch.strided


def _are_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype and bool(torch.equal(one, two))
