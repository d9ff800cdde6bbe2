"""Running statistics of models that are evaluated and not trained (averaged copies)."""

from torch import nn

from ..facts.models import StateFacts
from ..observation import Observation
from ..optimization.model_names import clean_name
from ..optimization.models import Model, Models
from ..user_lines import user_line

KIND = "statistics"  # of StateFacts
_NORMS = nn.modules.batchnorm._BatchNorm


class Norms:
    """The batch normalization of models that are evaluated only.

    Args:
        observation: Receives the facts.
        models: Make rows of tensors.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self._lines: dict[int, list[str]] = {}  # that compute statistics, by key of the model
        self._noted: set[tuple[int, int]] = set()  # key of the model, steps before

    def before_forward(self, model: Model, is_training: bool) -> None:
        """Add the running statistics before the first forward of an evaluation."""
        module, key = model.module(), model.facts.key
        if is_training or model.has_trained or module is None:
            return
        if module.training:
            self._lines[key] = [user_line()]
            return
        now = (key, self._observation.step)
        if now in self._noted:
            return
        self._noted.add(now)
        rows = {
            f"{key}/{clean_name(f'{name}.{kind}')}": row
            for name, norm in module.named_modules()
            if isinstance(norm, _NORMS)
            for kind in ("running_mean", "running_var")
            if getattr(norm, kind) is not None
            and (row := self._models.add_row(getattr(norm, kind))) is not None
        }
        if rows:
            name, step = model.facts.class_name, self._observation.step
            state = StateFacts(KIND, name, user_line(), step, rows=rows)
            state.changed_by = self._lines.get(key, [])
            self._observation.facts.states.append(state)
