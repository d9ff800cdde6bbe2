"""Judge the answers of ``paceline verify`` about scripts with known mistakes and right ones."""

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consequences import CONSEQUENCES

sys.path.append(str(Path(__file__).parents[1]))
from rates import rate

NEAR = 1  # a named line may be off by this many lines, as statements may have several
SCRIPT = "train.py"  # name of each script while it is verified
NO_VERDICT = 2  # exit code of an answer without a verdict: nothing could be compared


@dataclass
class Case:
    """A script, what is true of it, and what was found.

    Attributes:
        name: "KIND/WAY", or the name of a right script.
        kind: Id of the planted mistake; "" for a right script.
        names: Ids that name it.
        true: Further ids that are true of the script.
        lines: Numbers of the lines to blame.
        ranks: Number of ranks.
        found: Findings: mistake, nature, is_wrong, lines.
        code: Exit code of the command; None if it was ended.
        ended: Whether the command ended with an answer.
        seconds: Wall time of the command.
        output: End of what it printed where there is no answer.
    """

    name: str
    kind: str = ""
    names: list[str] = field(default_factory=list)
    true: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    ranks: int = 2
    found: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None
    ended: bool = False
    seconds: float = 0.0
    output: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the answer is that the script does not train what one process does."""
        return self.ended and self.code == 1

    @property
    def naming(self) -> list[dict[str, Any]]:
        """The findings that name the mistake, surely or as a question."""
        return [one for one in self.found if one["mistake"] in self.names]

    @property
    def named(self) -> bool:
        return bool(self.naming)

    @property
    def placed(self) -> bool:
        """Whether the first line of a finding that names the mistake is right."""
        return any(self._right(one["lines"][:1]) for one in self.naming)

    @property
    def placed_below(self) -> bool:
        """Whether any line of a finding that names the mistake is right."""
        return any(self._right(one["lines"]) for one in self.naming)

    def _right(self, places: list[str]) -> bool:
        for place in places:
            file, _, number = place.rpartition(":")
            of_script = Path(file).name == SCRIPT and number.isdigit()
            if of_script and any(abs(int(number) - line) <= NEAR for line in self.lines):
                return True
        return False

    @property
    def accusations(self) -> list[str]:
        """Ids of findings that are not true of the script, without questions."""
        allowed = {*self.names, *self.true, *CONSEQUENCES.get(self.kind, ())}
        return sorted(
            {
                one["mistake"]
                for one in self.found
                if one["is_wrong"] and one["mistake"] not in allowed
            }
        )

    @property
    def questions(self) -> list[str]:
        """Ids of further findings that only ask."""
        return sorted(
            {
                one["mistake"]
                for one in self.found
                if not one["is_wrong"] and one["mistake"] not in self.names
            }
        )


def read_answer(case: Case, code: int | None, output: str, errors: str) -> None:
    """Fill in a case from the command's exit code (None: it was ended), output and errors."""
    case.code = code
    try:
        findings = json.loads(output)["findings"]
        case.found = [
            {key: one[key] for key in ("mistake", "nature", "is_wrong", "lines")}
            for one in findings
        ]
        case.ended = code in (0, 1, NO_VERDICT)
    except (ValueError, KeyError, TypeError):
        case.ended = False
    if not case.ended:
        case.found = []
        case.output = (output[-500:] + errors[-1500:]).strip() or f"exit code {code}, no output"


def figures(cases: list[Case]) -> dict[str, Any]:
    """Return all rates, of all kinds and of each."""
    wrong = [case for case in cases if case.kind]
    right = [case for case in cases if not case.kind]
    times = [case.seconds for case in cases if case.ended]
    return {
        "exit_right": rate([case.is_wrong for case in right]),
        "exit_wrong": rate([case.is_wrong for case in wrong]),
        "exit_named": rate([case.is_wrong and case.named for case in wrong]),
        "exit_placed": rate([case.is_wrong and case.placed for case in wrong]),
        "no_verdict": rate([case.ended and case.code == NO_VERDICT for case in cases]),
        "right_with_exit_1": sorted(case.name for case in right if case.is_wrong),
        "named": rate([case.named for case in wrong]),
        "placed": rate([case.placed for case in wrong]),
        "placed_below": rate([case.placed_below for case in wrong]),
        "accused_wrongly": rate([bool(case.accusations) for case in wrong]),
        "accused_right": rate([bool(case.accusations) for case in right]),
        "asked_right": rate([bool(case.questions) for case in right]),
        "ended": rate([case.ended for case in cases]),
        "seconds_median": round(statistics.median(times), 1) if times else None,
        "seconds_most": round(max(times), 1) if times else None,
        "kinds": {
            kind: {
                "exit_wrong": rate([case.is_wrong for case in wrong if case.kind == kind]),
                "named": rate([case.named for case in wrong if case.kind == kind]),
                "placed": rate([case.placed for case in wrong if case.kind == kind]),
            }
            for kind in sorted({case.kind for case in wrong})
        },
    }


def line_of(case: Case) -> str:
    """Return the result of a case in one line."""
    if not case.ended:
        return f"--   {case.code} {case.name}: no answer: {case.output[-300:]}"
    found = ", ".join(
        f"{one['mistake']}{'' if one['is_wrong'] else '?'} {' '.join(one['lines'][:2])}"
        for one in case.found
    )
    if not case.kind:
        sign = "no" if case.accusations else "ok"
    else:
        sign = "ok" if case.placed else "line" if case.named else "no"
    more = f"; wrongly accused: {', '.join(case.accusations)}" if case.accusations else ""
    lines = f" (lines {', '.join(map(str, case.lines))})" if case.lines else ""
    found = found or "nothing"
    return f"{sign:4} {case.code} {case.name}{lines}: {found}{more} [{case.seconds:.0f} s]"
