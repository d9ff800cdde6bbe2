"""Call a Python function as a trial: ``python -m paceline.study.tune.call_function NAME JSON``.

Every rank calls it with the same arguments. Rank 0 reports what it returns: a number, or a dict of
the metrics.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...record.trial_reports import trial_reporter
from ...security.processes import import_folders
from ...security.schema import load_json
from .command import EPOCHS, OWN, RANKS, SEED, TRIAL

MODULE_NAME = "paceline_trial"


def find_function(text: str) -> Callable[..., Any]:
    """Return the function of FILE.py:NAME or MODULE:NAME.

    Raises:
        ValueError: There is none.
    """
    where, _, name = text.rpartition(":")
    sys.path[:] = import_folders(str((Path.cwd() / where).parent if where.endswith(".py") else "."))
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(MODULE_NAME, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise ValueError(f"study.function: {where} does not exist")
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE_NAME] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"study.function: {where} has no function {name}")
    return found  # type: ignore[no-any-return]


def main(text: str, arguments: str) -> None:
    tree = load_json(arguments.encode(), "the arguments of the trial")
    function = find_function(text)
    known = inspect.signature(function).parameters
    # Without study.epochs, the function's own default counts.
    own = {name: tree["own"][name] for name in OWN if name in known and tree["own"][name]}
    own |= {name: int(own[name]) for name in (TRIAL, SEED, RANKS, EPOCHS) if name in own}
    result = function(**tree["values"], **own)
    reporter = trial_reporter()
    if reporter is None or result is None:
        return
    values = result if isinstance(result, dict) else {reporter.request.metric: result}
    reporter.report(values)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
