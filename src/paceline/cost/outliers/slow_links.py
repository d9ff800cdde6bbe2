"""Find slow links between two hosts, and hosts all of whose links are slow."""

from collections.abc import Sequence
from statistics import median

from ...plurals import counted
from ..machine.machine_file import Machine
from ..machine.named_figures import NamedFigure, link_figures, typical_deviation
from ..machine.units import format_value, join_words
from .outlier import Outlier
from .slower_than_peers import MIN_DEVIATIONS, MIN_MADS, SlowerFigure, around, behind, find_slower

_MANY = 0.25  # share of the links: if more are slow, the network itself consists of parts


def find_slow_links(machine: Machine) -> list[Outlier]:
    """Return the outliers among the links; needs three hosts.

    Hosts come first, so that a bad network card is not reported as many bad links.
    """
    found = []
    every = link_figures(machine)
    for metric in ("bandwidth", "latency"):
        rest = [named for named in every if named.what == metric]
        while (bad := _worst_host(rest)) is not None:
            host, worse = bad
            found.append(_of_host(host, worse))
            rest = [named for named in rest if host not in named.hosts]
        found += _of_links(rest)
    return found


def _worst_host(rest: Sequence[NamedFigure]) -> tuple[str, SlowerFigure] | None:
    """Return the host whose best link is worse than the usual link between other hosts."""
    if len(rest) < 3:
        return None
    of_host: dict[str, list[NamedFigure]] = {}
    for named in rest:
        for host in named.hosts:
            of_host.setdefault(host, []).append(named)
    noise = MIN_DEVIATIONS * typical_deviation([named.figure for named in rest])
    found = []
    for host, own in of_host.items():
        others = [named.figure.median for named in rest if host not in named.hosts]
        if len(own) < 2 or not others:
            continue
        best = max(own, key=_speed)
        middle, apart = around(others)
        worse = behind(best, middle)
        gap = abs(best.figure.median - middle)
        if worse is not None and gap > max(noise, MIN_MADS * apart):
            found.append((host, worse))
    return max(found, key=lambda one: one[1].by, default=None)


def _speed(named: NamedFigure) -> float:
    return named.figure.median if named.more_is_better else -named.figure.median


def _of_host(host: str, worse: SlowerFigure) -> Outlier:
    named = worse.named
    value, peers = (format_value(x, named.figure.unit) for x in (named.figure.median, worse.peers))
    sentence = (
        f"all links of {host} are slow: {named.what} is {value} at best, {peers} between other "
        "hosts. HINT: check its network card and cable"
    )
    return Outlier("link", (host,), f"{named.what} of all links", value, peers, sentence, worse.by)


def _of_links(rest: Sequence[NamedFigure]) -> list[Outlier]:
    bad = find_slower(rest)
    if len(bad) > max(2, _MANY * len(rest)):
        return [_parts(bad, len(rest))]
    return [_of_link(worse) for worse in bad]


def _of_link(worse: SlowerFigure) -> Outlier:
    named = worse.named
    value, peers = (format_value(x, named.figure.unit) for x in (named.figure.median, worse.peers))
    sentence = (
        f"the link between {join_words(named.hosts)} is slow: {named.what} is {value}, that of"
    )
    what = f"{named.what} of the link"
    return Outlier(
        "link", named.hosts, what, value, peers, f"{sentence} other links {peers}", worse.by
    )


def _parts(bad: list[SlowerFigure], count: int) -> Outlier:
    """Report many slow links as one outlier: their number indicates the network's structure."""
    named, peers = bad[0].named, bad[0].peers
    middle = median(worse.named.figure.median for worse in bad)
    value, fast = format_value(middle, named.figure.unit), format_value(peers, named.figure.unit)
    hosts = tuple(dict.fromkeys(host for worse in bad for host in worse.named.hosts))
    sentence = (
        f"{len(bad)} of {counted(count, 'link')} {'is' if len(bad) == 1 else 'are'} slower than "
        f"the others: {named.what} is {value} instead "
        f"of {fast}, as between hosts on different switches; the slowest is between "
        f"{join_words(named.hosts)}"
    )
    return Outlier(
        "link", hosts, f"{named.what} of {len(bad)} links", value, fast, sentence, bad[0].by
    )
