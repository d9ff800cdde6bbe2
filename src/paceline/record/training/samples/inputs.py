"""Observe the batches of scripts that read no DataLoader: the inputs of their models."""

from ...hooks.batch_size import samples_in
from ..facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from ..observation import Observation
from ..optimization.models import Model, Models
from ..user_lines import user_line
from .contents import sample_checksums
from .epochs import shuffle_line
from .loaders import Loaders

MAX_BATCHES = 256


class Inputs:
    """The inputs of training forwards before which no loader was read.

    They count as batches of a loader without a dataset, whose indices are not known.

    Args:
        observation: Receives the facts.
        models: Know the inputs.
        loaders: Know whether there is a loader.
    """

    def __init__(self, observation: Observation, models: Models, loaders: Loaders) -> None:
        self._observation, self._models, self._loaders = observation, models, loaders
        self._facts: LoaderFacts | None = None

    def before_forward(self, model: Model, is_training: bool) -> None:
        """Add the inputs of a forward as a batch."""
        facts = self._observation.facts
        if not is_training or self._loaders.has_batches or len(facts.batches) >= MAX_BATCHES:
            return
        inputs = self._models.inputs
        samples = samples_in(inputs) if inputs else 0
        contents = sample_checksums(inputs, samples) if samples else []
        if not contents:
            return
        loader = self._facts = self._facts or self._new_loader()
        one = loader.passes[0]
        batch = BatchFacts(
            loader=loader.key,
            pass_number=0,
            number=one.batches,
            samples=samples,
            indices=None,
            contents=contents,
            step=self._observation.step,
        )
        one.batches += 1
        self._observation.unassigned.append(self._observation.add_batch(batch))

    def _new_loader(self) -> LoaderFacts:
        line = user_line()
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
            passes=[PassFacts(0, Phase.TRAINING, line, None, 0, None, False, 0)],
            sampler_seed_line=shuffle_line(),
        )
        self._observation.facts.loaders.append(loader)
        return loader
