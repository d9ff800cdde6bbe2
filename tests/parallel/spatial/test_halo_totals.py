"""Totals of halos in the record of a rank."""

from paceline.parallel.spatial import exchange
from paceline.parallel.spatial.exchange import FURTHER_LAYERS, MAX_NAMES_CHARS, HaloTotals
from paceline.record.ring.header_schema import MAX_HALO_LAYERS


def written(monkeypatch):
    found, at_exit = [], []
    monkeypatch.setattr(exchange, "update_all_headers", lambda halos: found.append(halos))
    monkeypatch.setattr(exchange.atexit, "register", at_exit.append)
    return found, at_exit


def test_the_last_exchanges_are_written_at_the_end(monkeypatch):
    found, at_exit = written(monkeypatch)
    totals = HaloTotals()
    for _ in range(3):
        totals.add("conv", 8, 10**9)
        totals.add("head", 4, 0)
    assert len(found) == 1  # not with each exchange
    (write,) = at_exit
    write()
    assert found[-1]["layers"] == [["conv", 3, 24, 3.0], ["head", 3, 12, 0.0]]
    assert 0 < found[-1]["seconds"] < 60


def test_names_have_a_limit(monkeypatch):
    _, _ = written(monkeypatch)
    for length in (10, 150):
        totals = HaloTotals()
        for number in range(2 * MAX_HALO_LAYERS):
            totals.add(f"{number:0{length}}", 1, 0)
        names = list(totals._layers)
        assert len(names) <= MAX_HALO_LAYERS
        assert sum(map(len, names)) <= MAX_NAMES_CHARS + len(FURTHER_LAYERS)
        assert sum(size for _, size, _ in totals._layers.values()) == 2 * MAX_HALO_LAYERS
