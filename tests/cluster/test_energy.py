"""Energy meter on artificial counters: what is charged, what cannot be read, what starts again."""

import types
from pathlib import Path

import pytest
from fake_sysfs import small, write

from paceline.cluster import energy as meter
from paceline.cluster.energy import EnergyMeter, EnergyUse, sysfs_counters

WRAP_UJ = 262143328850
CRAY = "sys/cray/pm_counters"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a host with two packages of 8 hardware threads, without memory limit."""
    write(tmp_path, small())
    monkeypatch.setattr(meter, "memory_limits", list)
    return tmp_path


def put(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def rapl(root: Path, zone: str, name: str, uj: int) -> None:
    folder = f"sys/class/powercap/{zone}"
    put(root, f"{folder}/name", name)
    put(root, f"{folder}/max_energy_range_uj", WRAP_UJ)
    put(root, f"{folder}/energy_uj", uj)


def packages(root: Path, *uj: int) -> None:
    for i, value in enumerate(uj):
        rapl(root, f"intel-rapl:{i}", f"package-{i}", value)


def used(meter: EnergyMeter, threads: range = range(16)) -> dict[str, EnergyUse]:
    meter.stop()
    return {one.source: one for one in meter.charged(threads)}


def measured(root: Path, threads: range, *after: int) -> dict[str, EnergyUse]:
    """Return what is charged while the packages' counters go from 0 to these values."""
    measuring = EnergyMeter(root)
    measuring.sample()
    packages(root, *after)
    return used(measuring, threads)


def test_a_package_is_charged_by_the_share_of_its_cores_that_the_job_holds(host: Path) -> None:
    packages(host, 0, 0)
    found = measured(host, range(2), 80_000_000, 80_000_000)
    assert list(found) == ["package 0"]  # no core of the other one is the job's
    one = found["package 0"]
    assert one.joules == pytest.approx(80 * 2 / 8)
    assert one.is_estimate
    assert "25 % of it are charged, the job's share of the cores" in one.how


def test_a_package_of_the_job_alone_is_measured_and_no_estimate(host: Path) -> None:
    packages(host, 0, 0)
    found = measured(host, range(16), 80_000_000, 20_000_000)
    assert [(one.joules, one.is_estimate) for one in found.values()] == [(80, False), (20, False)]


def test_a_counter_that_starts_again_at_its_range_loses_nothing(host: Path) -> None:
    packages(host, WRAP_UJ - 5_000_000)
    found = measured(host, range(16), 7_000_000)
    assert found["package 0"].joules == pytest.approx(12)


def test_every_reading_may_have_started_again(host: Path) -> None:
    packages(host, WRAP_UJ - 1_000_000)
    measuring = EnergyMeter(host)
    measuring.sample()
    for uj in (1_000_000, WRAP_UJ - 1_000_000, 1_000_000):
        packages(host, uj)
        measuring.sample()
    assert used(measuring)["package 0"].joules == pytest.approx(WRAP_UJ / 1e6 + 2)


def test_cores_graphics_and_the_second_interface_are_parts_of_a_package(host: Path) -> None:
    packages(host, 0)
    rapl(host, "intel-rapl:0:0", "core", 0)
    rapl(host, "intel-rapl:0:1", "dram", 0)
    rapl(host, "intel-rapl-mmio:0", "package-0", 0)
    rapl(host, "intel-rapl:1", "psys", 0)
    found, notes = sysfs_counters(host)
    assert [one.source for one in found] == ["package 0", "memory 0"]
    assert not notes


def test_memory_is_charged_by_the_memory_that_the_job_may_use(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "memory_limits", lambda: [(64 << 30, 0)])
    put(host, "proc/meminfo", f"MemTotal: {256 << 20} kB")
    packages(host, 0)
    rapl(host, "intel-rapl:0:1", "dram", 0)
    measuring = EnergyMeter(host)
    measuring.sample()
    rapl(host, "intel-rapl:0:1", "dram", 40_000_000)
    found = used(measuring)
    assert found["memory 0"].joules == pytest.approx(10)
    assert found["memory 0"].is_estimate
    assert not found["package 0"].is_estimate


def test_counters_that_only_root_reads_are_named(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(host, 0)
    path_open = Path.open

    def refuse(path: Path, *given: object, **options: object) -> object:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return path_open(path, *given, **options)

    monkeypatch.setattr(Path, "open", refuse)
    measuring = EnergyMeter(host)
    measuring.start().stop()
    assert measuring.charged() == []
    assert len(measuring.notes) == 1
    assert "energy_uj is not readable. HINT: only root reads it" in measuring.notes[0]


def test_a_machine_without_counters_says_so(host: Path) -> None:
    measuring = EnergyMeter(host)
    measuring.start().stop()
    assert measuring.charged() == []
    assert "no energy counters of the processors" in measuring.notes[0]


def test_cray_counters_of_a_node_contain_those_of_its_parts(host: Path) -> None:
    packages(host, 0)  # the same energy as the processors'
    names = ("energy", "cpu_energy", "memory_energy", "accel0_energy", "freshness")
    for name in names:
        put(host, f"{CRAY}/{name}", "1000 J 1664 us")
    measuring = EnergyMeter(host)
    measuring.sample()
    for name, joules in zip(names, (1400, 1200, 1060, 1100), strict=False):
        put(host, f"{CRAY}/{name}", f"{joules} J 1665 us")
    found = used(measuring, range(8))
    assert {name: one.joules for name, one in found.items()} == {
        "node": 200,
        "processors": 100,
        "memory": 30,
        "accelerator 0": 100,
    }
    assert sum(one.joules for one in found.values() if not one.within) == 200
    assert found["node"].is_estimate
    assert not found["accelerator 0"].is_estimate


def test_a_gpu_is_charged_as_its_counter_says(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joules = iter((5000, 5000, 12_000))
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(joules),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    put(host, "dev/nvidia0", "")
    put(host, "dev/nvidia1", "")
    packages(host, 0)
    measuring = EnergyMeter(host, nvml)
    measuring.sample()
    assert used(measuring)["GPU 1"].joules == 7


def test_energy_between_two_times_is_interpolated() -> None:
    one = EnergyUse("node", 30, False, "", times=[100, 110, 120], charged=[0, 10, 30])
    assert one.between(105, 115) == pytest.approx(15)
    assert one.between(0, 1000) == 30


def test_readings_go_on_until_the_meter_is_stopped(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "INTERVAL_S", 1e-3)
    packages(host, 0)
    measuring = EnergyMeter(host).start()
    while len(measuring._times) < 3:
        pass
    packages(host, 9_000_000)
    measuring.stop()
    (one,) = measuring.charged(range(16))
    assert one.joules == 9
    assert len(one.times) == len(one.charged) >= 3
