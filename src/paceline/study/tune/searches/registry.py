"""The searches by their names in a study file: samplers and pruners of Optuna, and Paceline's."""

import hashlib
import inspect
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..parameters import nearest
from ..study_file import StudySpec
from .checkpointed import POPULATION, PopulationSearch, PromotionSearch
from .search import MakeSampler, Search

if TYPE_CHECKING:
    from optuna import Study

HARMONICA = "harmonica"


@dataclass(frozen=True)
class Sampler:
    """A sampler of Optuna, or Paceline's Harmonica.

    Attributes:
        name: Name of its class.
        reseeds: Whether it draws from a random number generator of the process, which is therefore
            seeded for each trial.
        several: Whether it can search with several metrics.
        conditional: Whether parameters may depend on others.
        package: A package that it needs.
        random: Option with the number of points that it draws at random first; "": none.
    """

    name: str
    reseeds: bool = False
    several: bool = True
    conditional: bool = True
    package: str = ""
    random: str = ""


SAMPLERS = {
    "grid": Sampler("GridSampler", conditional=False),
    "random": Sampler("RandomSampler", reseeds=True),
    "qmc": Sampler("QMCSampler"),
    "tpe": Sampler("TPESampler", reseeds=True, random="n_startup_trials"),
    "cmaes": Sampler("CmaEsSampler", several=False, package="cmaes"),
    "nsga2": Sampler("NSGAIISampler", reseeds=True, random="population_size"),
    HARMONICA: Sampler(
        "HarmonicaSampler",
        reseeds=True,
        several=False,
        conditional=False,
        package="sklearn",
        random="samples",
    ),
}
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive-halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
}
# Searches of Paceline, by the name of the pruner.
SEARCHES: dict[str, type[Search]] = {"promotion": PromotionSearch, POPULATION: PopulationSearch}


def make_search(study: "Study", spec: StudySpec) -> Search:
    """Return the search of a study file. Raises ValueError, as ``check_search``."""
    make_sampler = sampler_maker(spec)
    study.pruner = make_pruner(spec)
    search = search_class(spec)(study, spec, make_sampler)
    if (points := grid_size(spec)) is not None:
        search.points = points
    return search


def check_search(spec: StudySpec) -> None:
    """Raise ValueError if the search is unknown, or does not fit the study."""
    sampler_maker(spec)(0)
    make_pruner(spec)
    search_class(spec).check(spec)


def search_class(spec: StudySpec) -> type[Search]:
    """Return the class of the search of a study file."""
    return SEARCHES.get(spec.table.pruner, Search)


def random_trials(spec: StudySpec, count: int) -> range:
    """Return which of the first trials are drawn at random, without a look at others."""
    name = spec.table.search
    if name == "random":
        return range(count)
    option = SAMPLERS[name].random
    if not option:
        return range(0)
    default = inspect.signature(_kind(name)).parameters[option].default
    return range(min(int(spec.search_options.get(option, default)), count))


def sampler_maker(spec: StudySpec) -> MakeSampler:
    """Return the function that makes the sampler of each trial. Raises ValueError."""
    name = spec.table.search
    if name not in SAMPLERS:
        near = nearest(name, SAMPLERS) or ", ".join(SAMPLERS)
        raise ValueError(f'study.search = "{name}" is not known. HINT: {near}')
    sampler = SAMPLERS[name]
    _check_fit(spec, name, sampler)
    options = dict(spec.search_options)
    kind = _kind(name)
    if name == "grid":
        if options:
            raise ValueError(f"the key search.{next(iter(options))} is not known for grid")
        kind, options["search_space"] = _grid_sampler(), _grid(spec)
    else:
        _check_options(kind, options, "search", ("seed",))

    def make(number: int) -> Any:
        seed = _seed(spec.table.seed, number) if sampler.reseeds else spec.table.seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # options that Optuna calls experimental
            return _construct(kind, {**options, "seed": seed}, "search")

    return make


def _kind(name: str) -> Any:
    """Return the class of a sampler."""
    import optuna

    if name == HARMONICA:
        from .harmonica import HarmonicaSampler  # it imports Optuna

        return HarmonicaSampler
    return getattr(optuna.samplers, SAMPLERS[name].name)


def make_pruner(spec: StudySpec) -> Any:
    """Return the pruner of Optuna. Raises ValueError."""
    import optuna

    name, options = spec.table.pruner, dict(spec.pruner_options)
    if name in SEARCHES:
        return optuna.pruners.NopPruner()
    if name not in PRUNERS:
        near = nearest(name, (*PRUNERS, *SEARCHES)) or ", ".join((*PRUNERS, *SEARCHES))
        raise ValueError(f'study.pruner = "{name}" is not known. HINT: {near}')
    kind = getattr(optuna.pruners, PRUNERS[name])
    _check_options(kind, options, "pruner")
    if name == "hyperband" and spec.table.epochs is not None:
        options.setdefault("max_resource", spec.table.epochs)
    return _construct(kind, options, "pruner")


def _check_fit(spec: StudySpec, name: str, sampler: Sampler) -> None:
    if len(spec.metrics) > 1 and not sampler.several:
        raise ValueError(
            f'study.search = "{name}" searches with one metric, and this study has '
            f"{len(spec.metrics)}. HINT: tpe or nsga2"
        )
    dependent = [parameter.name for parameter in spec.parameters if parameter.when]
    if dependent and not sampler.conditional:
        raise ValueError(
            f'study.search = "{name}" needs parameters that always exist, and {dependent[0]} '
            "depends on others (when). HINT: tpe or random"
        )
    if name == HARMONICA and not any(len(parameter.choices) > 1 for parameter in spec.parameters):
        raise ValueError(
            'study.search = "harmonica" searches over choices, and no parameter has several. HINT: '
            "tpe or cmaes"
        )
    if sampler.package:
        try:
            __import__(sampler.package)
        except ImportError:
            raise ValueError(
                f'study.search = "{name}" needs the package {sampler.package}, which is not '
                "installed. HINT: pip install 'paceline[tune]'"
            ) from None


def _grid_sampler() -> Any:
    """Return Optuna's GridSampler for a runner that asks for the points itself."""
    from optuna.samplers import GridSampler

    class Grid(GridSampler):
        def after_trial(self, *_: Any) -> None:
            """Do not stop the study after its last point, which only ``optimize`` can do."""

    return Grid


def grid_size(spec: StudySpec) -> int | None:
    """Return the number of points of a grid; None for other samplers."""
    if spec.table.search != "grid":
        return None
    return math.prod(len(values) for values in _grid(spec).values())


def _grid(spec: StudySpec) -> dict[str, Any]:
    space = {}
    for parameter in spec.parameters:
        values = parameter.grid()
        if values is None:
            raise ValueError(
                f'study.search = "grid" needs all values of a parameter, and {parameter.name} has '
                f"a range. HINT: choices = [...] in parameters.{parameter.name}, or step"
            )
        space[parameter.name] = values
    return space


def _check_options(
    kind: Any, options: dict[str, Any], table: str, own: tuple[str, ...] = ()
) -> None:
    known = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    for name in options:
        if name in own:
            raise ValueError(f"the key {table}.{name} is study.{name}. HINT: move it to [study]")
        if name not in known:
            near = nearest(name, known) or ", ".join(known)
            raise ValueError(
                f"the key {table}.{name} is no option of Optuna's {kind.__name__}. HINT: {near}"
            )


def _construct(kind: Any, options: dict[str, Any], table: str) -> Any:
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the table [{table}] does not fit {kind.__name__}: {error}") from None


def _seed(seed: int, number: int) -> int:
    """Return the seed of a trial, which differs between trials and studies."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
