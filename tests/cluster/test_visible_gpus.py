"""The GPUs that CUDA_VISIBLE_DEVICES leaves visible, counted and numbered as CUDA does."""

import pytest

from paceline.cluster.binding_plan import RankBinding
from paceline.cluster.topology.visible_gpus import visible_devices
from paceline.launch.affinity.bind_ranks import variables
from paceline.launch.job import Job

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-89aa0000-0000-0000-0000-000000000001")
BUSES = ("0000:3b:00.0", "0000:af:00.0")


@pytest.fixture
def host(tmp_path):
    """A host with two NVIDIA GPUs and their driver."""
    for minor, (bus, uuid) in enumerate(zip(BUSES, UUIDS, strict=True)):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        # The numbers of the device files need not follow the order of bus ids.
        text = f"Model: \t\t Any\nGPU UUID: \t {uuid}\nDevice Minor: \t {1 - minor}\n"
        (folder / "information").write_text(text)
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{minor}").touch()
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0,1", [0, 1]),
        (" 1 , 0 ", [1, 0]),
        ("", []),
        ("NoDevFiles", []),  # Slurm sets this for a step without GPUs
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,none,1", [0]),
        ("0,7,1", [0]),  # the host has no eighth GPU
        ("0,0", []),
        ("1,0,1", []),
        ("1gpu,0", [1, 0]),
        (",0", []),
        (f"{UUIDS[1]},{UUIDS[0]}", [1, 0]),
        ("GPU-893", [0]),
        ("GPU-89", []),  # both GPUs begin like this
        ("GPU-8932f937,GPU-0123", [0]),
        ("GPU-8932f937,GPU-8932f937", []),
    ],
)
def test_visible_devices_are_those_of_cuda(host, value, devices):
    environment = {"CUDA_VISIBLE_DEVICES": value}
    assert visible_devices(environment, host) == devices
    assert len(visible_devices(environment, host)) == len(devices)


def test_all_gpus_are_visible_without_the_variable(host):
    assert visible_devices({}, host) == [0, 1]
    assert len(visible_devices({}, host)) == 2
    (host / "dev/nvidia0").unlink()  # as in a container that was given one of them
    assert len(visible_devices({}, host)) == 1


def test_gpus_without_driver_files_are_counted_from_the_variable(tmp_path):
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)) == 3
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": ",".join(UUIDS)}, tmp_path)) == 2
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ",".join(UUIDS)}, tmp_path) == [-1, -1]
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, tmp_path)) == 0
    assert len(visible_devices({}, tmp_path)) == 0


@pytest.mark.parametrize(
    "value",
    [
        "MIG-4f9d3fa8-0000-5c0d-9a2f-000000000000",
        "MIG-4f9d3fa8-0000-5c0d-9a2f-000000000000,MIG-4f9d3fa8-1111-5c0d-9a2f-000000000000",
        "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0,MIG-GPU-89aa0000/1/0",
    ],
)
def test_a_process_sees_one_mig_device(host, value):
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": value}, host)) == 1
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": value}, host)) == 1


def test_mig_device_is_on_the_card_that_its_name_contains(host):
    value = "MIG-GPU-89aa0000-0000-0000-0000-000000000001/1/0"
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}, host) == [1]


def test_other_order_than_by_bus_id_leaves_the_cards_unknown(host):
    environment = {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert visible_devices(environment, host) == [-1, -1]
    assert visible_devices({**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, host) == [1, 0]
    by_name = {**environment, "CUDA_VISIBLE_DEVICES": UUIDS[1]}
    assert visible_devices(by_name, host) == [1]


def test_bound_ranks_number_their_gpus_by_bus_id():
    place = RankBinding((0, 1), device=0, threads=2)
    job = Job("train.py", bind="device")
    assert variables(job, place, {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in variables(job, place, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    unbound = RankBinding((), device=0, threads=2)
    assert "CUDA_DEVICE_ORDER" not in variables(job, unbound, {})
    assert "CUDA_DEVICE_ORDER" not in variables(job, RankBinding((0, 1), threads=2), {})
