"""Results of all steps as one dictionary of plain values, for the launcher.

hosts: HostFacts, each with "more", facts that the machine file format has no field for.
collectives, pairs: as in cost.machine.
unreachable: Hosts that did not answer, each with the reason.
notes: Failures and remarks, each with "hosts", "measure" and "text".
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...cluster.topology.racks import spread_over_switches
from .measure.link_pairs import EVERY_PAIR
from .participants import MeasurementResults, ProbeHost

# The field of HostFacts that a step measures, where its name differs from the step's.
FIELDS = {"import torch": "import_torch", "clocks": "clock_offset_s"}


class Summary:
    """Collector of the results of all steps."""

    def __init__(self, hosts: Sequence[ProbeHost], folder: Path | None) -> None:
        self._hosts: dict[str, dict[str, Any]] = {
            host.name: {"name": host.name, "more": {"machine": host.machine}} for host in hosts
        }
        self._collectives: list[Any] = []
        self._pairs: list[Any] = []
        self._notes: list[dict[str, Any]] = []
        machines: dict[str, list[str]] = {}
        for host in hosts:
            machines.setdefault(host.machine, []).append(host.name)
        for names in machines.values():
            if len(names) > 1:
                text = "are on one machine, so each was measured alone, one after the other"
                self._note(names, "machine", text)
        if folder is not None and len(machines) > 1:
            text = f"{folder} was measured from {len(machines)} machines at the same time"
            self._note(list(self._hosts), "storage", text)
        if len(hosts) > EVERY_PAIR:
            text = (
                f"not all pairs of the {len(hosts)} hosts were measured: neighbours and some others"
            )
            self._note(list(self._hosts), "pairs", text)

    def facts(self, results: MeasurementResults) -> None:
        for name, (found, more) in results.values.items():
            own = self._hosts[name]
            self._hosts[name] = {**own, **found, "more": {**own["more"], **more}}
        self._failed("facts", results)
        racks = {name: own["more"].get("leaf_switch", "") for name, own in self._hosts.items()}
        if spread := spread_over_switches(racks):
            self._note(list(racks), "switches", spread)

    def imports(self, results: MeasurementResults) -> None:
        for name, found in results.values.items():
            own = self._hosts[name]
            own["import_torch"] = found["seconds"]
            for part in ("busy", "first_s", "first_busy_s", "calls"):
                own[f"import_torch_{part}"] = found[part]
            own["more"] |= {"import_torch_calls_by": found["counted_by"]}
        self._failed("import torch", results)

    def part(self, field: str, results: MeasurementResults) -> None:
        """Add a step's results that form one list field of HostFacts."""
        for name, found in results.values.items():
            self._hosts[name][field] = found
        self._failed(field, results)

    def offsets(self, results: MeasurementResults) -> None:
        for found in results.values.values():
            for name, (offset, uncertainty) in found.items():
                self._hosts[name]["clock_offset_s"] = offset
                self._hosts[name]["clock_uncertainty_s"] = uncertainty
        self._failed("clocks", results)

    def collectives(self, measure: str, results: MeasurementResults) -> None:
        self._collectives += [one for found in results.values.values() for one in found]
        self._failed(measure, results)

    def pairs(self, results: MeasurementResults) -> None:
        self._pairs += [one for found in results.values.values() for one in found]
        self._failed("links", results)

    def as_json(self, silent: dict[str, str]) -> dict[str, Any]:
        return {
            "hosts": list(self._hosts.values()),
            "collectives": self._collectives,
            "pairs": self._pairs,
            "unreachable": silent,
            "notes": self._notes,
        }

    def _note(self, hosts: list[str], measure: str, text: str) -> None:
        self._notes.append({"hosts": hosts, "measure": measure, "text": text})

    def _failed(self, measure: str, results: MeasurementResults) -> None:
        """Add a note for each reason of failure; hosts with the same reason share one note."""
        alike: dict[str, list[str]] = {}
        for name, why in results.errors.items():
            alike.setdefault(why, []).append(name)
            own = self._hosts[name]
            if not measure.startswith(("collectives", "links")):
                field = FIELDS.get(measure, measure)
                own["missing"] = {**own.get("missing", {}), field: why}
        for why, names in alike.items():
            self._note(names, measure, why)
