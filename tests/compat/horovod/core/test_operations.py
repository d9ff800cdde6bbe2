"""Horovod's operations on 1, 2 and 4 ranks, and on process sets, from its documentation.

The cases of operation_cases.py and process_set_cases.py run in one job for each number of ranks.
"""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import operation_cases
import process_set_cases
import pytest
import ranks
import torch

import fake_gpu
import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.core import exchange
from paceline.compat.horovod.torch.submission import checked

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Return a function that returns the results of a script's cases on each rank."""
    known = {}

    def of_script(name, size, **variables):
        if variables:
            return run(name, size, **variables)
        if (name, size) not in known:
            known[name, size] = run(name, size)
        return known[name, size]

    def run(name, size, **variables):
        folder = tmp_path_factory.mktemp(f"cases-{size}")
        try:
            ranks.run(HERE / name, folder, ranks=size, check=False, timeout=60, **variables)
        except subprocess.TimeoutExpired:
            pass  # the cases after the one that hangs have no result
        files = [folder / f"{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    return of_script


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", operation_cases.CASES)
def test_operation(name, size, results):
    for rank, found in enumerate(results("operation_cases.py", size)):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"


def test_operations_over_gloo(results):
    for rank, found in enumerate(results("operation_cases.py", 2, PACELINE_EXCHANGE="gloo")):
        assert dict.fromkeys(operation_cases.CASES, "") == found, f"rank {rank}"


def test_operations_through_copies(results):
    for rank, found in enumerate(results("copied_cases.py", 2)):
        assert dict.fromkeys(operation_cases.CASES, "") == found, f"rank {rank}"


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        (["a", "a", "b"], "ranks 0, 4 share a GPU, which NCCL refuses. HINT:"),
        (["a", "b", "c"], ""),
        (["", "", "c"], ""),  # PyTorch does not report which
    ],
)
def test_tensors_of_a_shared_gpu_go_through_the_host(gpus, told, monkeypatch, capfd):
    exchange._report_shared_gpu.cache_clear()
    monkeypatch.setattr(exchange, "gpu_identifier", lambda device: gpus[0])
    monkeypatch.setattr(exchange, "all_gather_objects", lambda own, *_: gpus)
    group = SimpleNamespace(_device_types=[torch.device("cpu"), torch.device("cuda")])
    ours = exchange.Exchange(group, 0, [0, 4, 5])
    with fake_gpu.fake_gpu(monkeypatch):
        tensor = torch.empty(3, device="cuda:0")
        assert not ours.divides(torch.empty(3))
        assert ours.divides(tensor) == (not told)
        assert ours._exchangeable(tensor).device.type == ("cpu" if told else "cuda")
    output = "".join(capfd.readouterr())
    assert told in output
    assert output.count("share a GPU") == bool(told)


def test_tensors_of_a_gpu_without_nccl_go_through_the_host(monkeypatch):
    ours = exchange.Exchange(SimpleNamespace(_device_types=[torch.device("cpu")]), 0, [0, 1])
    with fake_gpu.fake_gpu(monkeypatch):
        assert ours._exchangeable(torch.empty(3, device="cuda:0")).device.type == "cpu"


def test_tensors_of_several_gpus_are_refused(monkeypatch):
    hvd.init()
    with fake_gpu.fake_gpu(monkeypatch):
        first, other = (torch.empty(3, device=name) for name in ("cuda:0", "cuda:1"))
        checked("allreduce", [first])
        for tensors in ([other], [first, other]):
            with pytest.raises(ValueError, match=r"cuda:0 and of cuda:1 on one rank .* HINT: "):
                checked("allreduce", tensors)
        with pytest.raises(ValueError, match="cuda:0 and of the CPU in one operation"):
            checked("grouped_allreduce", [first, torch.ones(3, device="cpu")])
    hvd.shutdown()


@pytest.mark.parametrize("name", process_set_cases.CASES)
def test_process_sets(name, results):
    for rank, found in enumerate(results("process_set_cases.py", 4)):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"
