"""One knob: a setting, or an edit of the script, that may remove a cause of lost time."""

from dataclasses import dataclass

from .value_types import Choice, LayoutText, ModuleNames, Range, Switch

COMPUTING = "computing"  # not a cause: applies if no cause limits the training


@dataclass(frozen=True)
class Knob:
    """One knob.

    Attributes:
        does: What the knob changes, for the user.
        answers: Ids of the causes in ``paceline diagnose`` that it may remove, or ``COMPUTING``.
        edit: The equivalent edit of the script.
        hook: module:function under ``paceline`` that sets the knob in a rank; empty if the script
            must be edited.
        value: Values that the knob accepts; None if the script must be edited.
        looks_for: Regular expression that finds the line of the script to edit.
        costs: Possible costs, for the user.
        numbers: Whether results change by more than the order of summation causes.
        effort: Work that the remedy needs, from 1 (one value) to 3 (a part of the script is
            rewritten, or the job needs other nodes).
        excludes: Names of knobs that cannot be set together with this one.
    """

    does: str
    answers: tuple[str, ...]
    edit: str
    hook: str = ""
    value: Range | Switch | Choice | LayoutText | ModuleNames | None = None
    looks_for: str = ""
    costs: str = ""
    numbers: bool = False
    excludes: tuple[str, ...] = ()
    effort: int = 1
