"""Time of each test: stored in pytest's cache, and printed at the end of a run.

CPU time counts, because it depends less on other load than elapsed time does: that of the test's
process, of processes that it waits for, and of commands that ``warm_start`` starts.
"""

import resource
from collections import Counter

import pytest
import warm_start

KEY = "paceline/durations"  # in pytest's cache: {test: [CPU seconds, elapsed seconds]}
SHOWN = 15
MIN_SHOWN_S = 0.5
MIN_TESTS_FOR_FILES = 50


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + warm_start.cpu_s


class Durations:
    """A plugin. Workers of xdist measure, and send the result with the report of the teardown."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._start_s = config, 0.0
        self._found: dict[str, list[float]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._start_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_s", cpu_s() - self._start_s))
        return report

    def pytest_runtest_logreport(self, report) -> None:
        measured = self._found.setdefault(report.nodeid, [0.0, 0.0])
        measured[0] += dict(report.user_properties).get("cpu_s", 0.0)
        measured[1] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter) -> None:
        if hasattr(self._config, "workerinput") or not self._found:
            return
        if cache := getattr(self._config, "cache", None):  # not with -p no:cacheprovider
            cache.set(KEY, cache.get(KEY, {}) | self._found)
        files, tests = Counter(), Counter({test: cpu for test, (cpu, _) in self._found.items()})
        for test, cpu in tests.items():
            files[test.partition("::")[0]] += cpu
        show = terminalreporter
        show.section(f"most CPU time, of {sum(tests.values()):.0f} s")
        for name, cpu in tests.most_common(SHOWN):
            if cpu >= MIN_SHOWN_S:
                show.write_line(f"{cpu:7.1f} s of {self._found[name][1]:.1f} s  {name}")
        for name, cpu in files.most_common(SHOWN) if len(tests) >= MIN_TESTS_FOR_FILES else ():
            show.write_line(f"{cpu:7.1f} s in all  {name}")
