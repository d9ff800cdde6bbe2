"""Observe random numbers: states of the global generators, lines that draw, calls that seed."""

import functools
import json
import os
from collections.abc import Callable, Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from ..record.hooks.taps import Function, Tap
from .facts.events import DrawFacts, SeedFacts
from .generators import function_states, generator_states, owned_states, script_states
from .observation import Observation
from .optimization.models import Model
from .samples.loaders import Loaders, OpenPass
from .tracers import LineTracer
from .user_lines import user_line

# Seeds


_SEEDS_HOOK = "the seeds"
MAX_SEEDS = 256


class Seeds:
    """The calls that seed global generators, or make a seeded one of NumPy.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Subscribe to the functions."""
        functions = [
            ("torch.random", "manual_seed", "torch"),
            ("random", "seed", "python"),
            ("numpy.random", "seed", "numpy"),
            ("numpy.random", "default_rng", "own"),
        ]
        if torch.manual_seed is not torch.random.manual_seed:  # torch._dynamo has wrapped one
            functions.append(("torch", "manual_seed", "torch"))
        for module, name, generator in functions:
            note = functools.partial(self._note, generator)
            tap = Tap(module, name, is_traced=True)
            tap.before(self._observation.observed(_SEEDS_HOOK, note))

    def _note(self, generator: str, *args: Any, **options: Any) -> None:
        value: Any = next(iter([*args, *options.values()]), None)
        line, facts = user_line(), self._observation.facts
        number = int(value) if hasattr(value, "__int__") and not isinstance(value, str) else None
        if line and number is not None and len(facts.seeds) < MAX_SEEDS:
            facts.seeds.append(SeedFacts(generator, number, line, self._observation.step))


# The lines that draw


MAX_EVENTS = 5000  # lines that are looked at


class DrawLines:
    """The lines that draw, by place.

    At each place the lines are found once, in an occurrence after the first one that drew.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[str, str]] = {}  # line by generator
        self._done: set[Hashable] = set()
        self._place: Hashable = None
        self._states: Callable[[], dict[str, int]] = dict
        self._tracer = LineTracer(lambda: self._states(), self._note, MAX_EVENTS)

    def line(self, place: Hashable, generator: str) -> str:
        """Return the line that draws at a place, or ""."""
        return self._found.get(place, {}).get(generator, "")

    def start(self, place: Hashable, states: Callable[[], dict[str, int]]) -> None:
        """Begin to look at a place, if its lines are not known yet.

        states: Returns checksums of the generators.
        """
        if place in self._done or self._tracer.is_running:
            return
        self._states = states
        if self._tracer.start():
            self._done.add(place)
            self._place = place

    def stop(self) -> None:
        """End to look."""
        self._tracer.stop()

    def _note(self, generator: str, line: str, _: str) -> None:
        self._found.setdefault(self._place, {}).setdefault(generator, line)


_HOOK = "the random numbers"
MAX_FORWARDS = 12  # of a model
MAX_WORKER_BATCHES = 24  # of a worker's fetcher


class Draws:
    """The random numbers of this process, and of its loaders' workers.

    Args:
        observation: Receives the facts.
        loaders: Know the pass that fetches.
    """

    def __init__(self, observation: Observation, loaders: Loaders) -> None:
        self._observation, self._loaders = observation, loaders
        self._construction: tuple[dict[str, int], str] | None = None  # states and line
        self._forward: tuple[Model, dict[str, int], str] | None = None  # of a running forward
        # Of a batch: its place, the states when it was returned, those after the last note, the
        # generators that were used, the line of its backward.
        self._loop_place: tuple[int, int, int] | None = None
        self._loop_start: dict[str, int] = {}
        self._loop: dict[str, int] | None = None
        self._loop_drawn: set[str] = set()
        self._loop_line, self._is_trained = "", False
        self._lines = DrawLines()
        self._fetches_draw = self._has_loop_draws = False
        self._drawing_models: set[int] = set()
        self._folder = Path(observation.settings.folder)
        # Of a worker: its fetcher, and the passes before it and batches of it.
        self._fetcher: Any = None
        self._passes = self._fetched = 0

    def install(self) -> None:
        """Subscribe to the fetchers, and to the first parameter that is registered."""
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            Tap("torch.utils.data._utils.fetch", f"{name}.fetch").around(self._fetch)
        parameters: Any = nn.modules.module
        parameters.register_module_parameter_registration_hook(self._note_construction)
        self._observation.before_end += [self._end_loop, self._read_workers]

    def _fetch(self, fetch: Function, fetcher: Any, possibly_batched_index: Any) -> Any:
        guarded = self._observation.guarded
        if self._observation.is_over:
            return fetch(fetcher, possibly_batched_index)
        before = guarded(_HOOK, self._begin_fetch)(fetcher)
        try:
            result = fetch(fetcher, possibly_batched_index)
        finally:
            guarded(_HOOK, self._lines.stop)()
        if before is not None:
            guarded(_HOOK, self._note_fetch)(fetcher, before)
        return result

    def _begin_fetch(self, fetcher: Any) -> dict[str, int]:
        opened = self._loaders.fetching
        if opened is not None and self._fetches_draw:
            self._lines.start(("fetch", opened.loader.key), lambda: self._states(fetcher))
        return self._states(fetcher)

    def _states(self, fetcher: Any) -> dict[str, int]:
        owned = owned_states(fetcher.dataset) | function_states(fetcher.collate_fn)
        return generator_states() | owned

    def _note_fetch(self, fetcher: Any, before: dict[str, int]) -> None:
        opened, worker = self._loaders.fetching, get_worker_info()
        if opened is None:
            return
        number, pass_number = opened.returned, opened.facts.number
        if worker is not None:
            if fetcher is not self._fetcher:  # a worker that persists has one for each pass
                self._passes += self._fetcher is not None
                self._fetcher, self._fetched = fetcher, 0
            if self._fetched >= MAX_WORKER_BATCHES:
                return
            number = self._fetched * worker.num_workers + worker.id
            pass_number += self._passes
            self._fetched += 1
        after, place = self._states(fetcher), worker.id if worker is not None else None
        key = opened.loader.key
        self._fetches_draw |= any(after.get(name) != state for name, state in before.items())
        facts = [
            DrawFacts(
                *("fetch", name, place, key, pass_number, number),
                *(state, after.get(name) != state),
                self._lines.line(("fetch", key), name) or opened.loader.line,
            )
            for name, state in before.items()
        ]
        if worker is None:
            self._observation.facts.draws += facts
        else:
            self._write(facts)

    def _write(self, facts: list[DrawFacts]) -> None:
        path = self._folder / f"draws-{self._observation.pid}-{os.getpid()}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in facts)

    def _read_workers(self) -> None:
        """Add what the workers have written, and lines that were found after the first draws."""
        for path in sorted(self._folder.glob(f"draws-{self._observation.pid}-*.jsonl")):
            for line in path.read_text().splitlines():
                self._observation.facts.draws.append(DrawFacts(**json.loads(line)))
        found = {(x.place, x.loader, x.generator): x.line for x in self._observation.facts.draws}
        for one in self._observation.facts.draws:
            if one.has_drawn and one.place != "construction":
                one.line = found[one.place, one.loader, one.generator]

    # The rank itself

    def _note_construction(self, module: Any, name: str, parameter: Any) -> None:
        if parameter is None or self._construction is not None:
            return
        if not self._observation.is_observed:
            return
        states = self._observation.guarded(_HOOK, generator_states)() or {}
        self._construction = (states, user_line())

    def end_construction(self) -> None:
        """Note the states after the first model was made: it is wrapped, or has an optimizer."""
        if self._construction is not None and self._construction[0]:
            before, where = self._construction
            self._construction = {}, ""
            self._add("construction", before, generator_states(), 0, 0, 0, where)

    def before_forward(self, model: Model, is_training: bool) -> None:
        """Note the states before a forward."""
        if not is_training:
            return
        states, line = generator_states(), user_line()
        self.end_construction()
        self._compare_loop(states | script_states())
        self._loop = None
        self._lines.stop()
        if model.forwards <= MAX_FORWARDS:
            self._forward = (model, states, line)
            if model.facts.key in self._drawing_models and not model.is_compiled:
                self._lines.start(("forward", model.facts.key), generator_states)

    def after_forward(self, *_: Any) -> None:
        """Note the states after a forward."""
        if self._forward is None:
            return
        (model, before, line), self._forward = self._forward, None
        self._lines.stop()
        after = generator_states()
        if after != before:
            self._drawing_models.add(model.facts.key)
        self._add("forward", before, after, model.facts.key, 0, model.forwards - 1, line)
        self._loop = after | script_states()

    def after_batch(self, opened: OpenPass, number: int, batch: Any) -> None:
        """Note the states when a batch is returned to the script."""
        self._end_loop()
        if number < MAX_FORWARDS:
            self._loop = self._loop_start = _states_of_loop()
            self._loop_drawn = set()
            self._loop_place = (opened.loader.key, opened.facts.number, number)
            if self._has_loop_draws:
                self._lines.start("loop", _states_of_loop)

    def before_backward(self) -> None:
        """Note the states before a backward, which a forward may contain (Lightning)."""
        self.after_forward()
        if self._loop_place is not None:
            self._lines.stop()
            self._compare_loop(_states_of_loop())
            self._has_loop_draws |= bool(self._loop_drawn)
            self._loop = None
            self._is_trained = True
            self._loop_line = user_line()

    def _compare_loop(self, states: dict[str, int]) -> None:
        """Note which generators the script itself has used since the last note."""
        if self._loop is not None:
            self._loop_drawn |= {n for n, x in self._loop.items() if states.get(n, x) != x}

    def _end_loop(self) -> None:
        """Add the draws of the script between a batch and its backward."""
        if self._loop_place is not None and self._is_trained:
            for name, state in self._loop_start.items():
                place = ("loop", name, None, *self._loop_place)
                drawn = name in self._loop_drawn
                line = self._lines.line("loop", name) or self._loop_line
                facts = DrawFacts(*place, state, drawn, line)
                self._observation.facts.draws.append(facts)
        self._loop_place, self._is_trained = None, False

    def _add(
        self,
        place: str,
        before: dict[str, int],
        after: dict[str, int],
        key: int,
        pass_number: int,
        number: int,
        line: str,
    ) -> None:
        for name, state in before.items():
            drawn, where = after.get(name) != state, self._lines.line((place, key), name)
            facts = (place, name, None, key, pass_number, number, state, drawn, where or line)
            self._observation.facts.draws.append(DrawFacts(*facts))


def _states_of_loop() -> dict[str, int]:
    return generator_states() | script_states()
