"""GPU kernels as events.

No GPU is involved: kernels are made by hand or are operators of the CPU.
"""

import time
from types import SimpleNamespace

import pytest
import ranks
from records import Rank, report_of
from torch._C._autograd import DeviceType

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.analyze.records.read_record import parse_record
from paceline.observe.attach import sampler_of_run
from paceline.record.experiments.rung import CACHED, EVERYTHING, Rung
from paceline.record.hooks import sampled_steps
from paceline.record.hooks.sampled_steps import (
    Kernel,
    KernelSampler,
    read_kernels,
    write_kernels,
)
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.states import Op, State

LAUNCHED = [
    {"amount": 1000, "seq": n, "group": 1, "op": int(Op.ALL_REDUCE), "peer": -1} for n in (7, 8)
]
KERNELS = [
    Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 900, 1500),
    Kernel("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", 100, 600),
    Kernel("void at::native::vectorized_elementwise_kernel<4, ...>", 650, 1000),
    Kernel("Memcpy HtoD (Pinned -> Device)", 5000, 6000),
    Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 6500, 7000),
]


def test_compute_kernels_are_merged_and_nccl_kernels_matched():
    recorder = Recorder(0, 1)
    assert recorder.new_group("0", 2, 0) == LAUNCHED[0]["group"]
    assert write_kernels(recorder, KERNELS, offset=1_000_000, launched=LAUNCHED)
    events = parse_record(recorder.snapshot()).events
    computing = events[events["state"] == State.KERNEL]
    assert computing[["start", "end", "amount"]].tolist() == [
        (1_000_100, 1_001_000, 2),
        (1_005_000, 1_006_000, 1),
    ]
    talking = events[events["state"] == State.COMMUNICATION_KERNEL]
    assert talking[["start", "seq", "group"]].tolist() == [(1_000_900, 7, 1), (1_006_500, 8, 1)]


def test_kernels_are_not_matched_if_launch_count_differs():
    recorder = Recorder(0, 1)
    assert not write_kernels(recorder, KERNELS, offset=0, launched=LAUNCHED[:1])
    events = parse_record(recorder.snapshot()).events
    assert set(events["group"].tolist()) == {0}


def test_communication_kernel_waiting_for_late_rank_is_wait_time(tmp_path):
    """Rank 1 arrives 30 ms later, so rank 0's communication kernel spins.

    10 ms of each exchange overlap with computation on another stream.
    """
    made = [Rank(tmp_path, i, 2) for i in range(2)]
    for i, rank in enumerate(made):
        for step in range(10):
            begin = 100 * step
            arrived = begin + 40 + 30 * i
            rank.was(State.KERNEL, begin, arrived)
            fields = {"seq": step + 1, "group": 1, "op": Op.ALL_REDUCE, "amount": 1 << 20}
            rank.was(State.COMMUNICATION_KERNEL, arrived - 10, begin + 90, **fields)
            rank.was(State.KERNEL, begin + 90, begin + 100)
            rank.step(begin, begin + 100, number=step, samples=4)
    report = report_of(made)
    first, second = report.states
    assert first["useful"] == pytest.approx(0.5)
    assert second["useful"] == pytest.approx(0.8)
    assert first["wait"] == pytest.approx(0.2)  # from 40 to 60, where the last kernel began
    assert first["transfer"] == pytest.approx(0.3)
    assert second["wait"] == 0
    assert second["transfer"] == pytest.approx(0.2)
    assert report.hidden == [pytest.approx(0.1)] * 2
    assert report.losses[0].kind in ("wait", "transfer")


SESSIONS = """
    import sys, torch
    from paceline.observe import attach
    from paceline.record.hooks.sampled_steps import KernelSampler, Kernel

    def operators(profiler):  # of the CPU, in place of a device's kernels
        events = profiler.profiler.kineto_results.events()
        return [Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
                for e in events if e.name() == "aten::addmm"]

    recorder = attach._loop.recorder
    cpu = torch.profiler.ProfilerActivity.CPU
    recorder.kernel_sampler = KernelSampler(recorder, operators, cpu)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = None
    for step in range(60):
        if sys.argv[1] == "own" and step in (10, 25):
            own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            own.start()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        if own is not None and step in (15, 30):
            own.stop()
            names = [event.key for event in own.key_averages()]
            print("own session saw addmm:", "aten::addmm" in names, flush=True)
            own = None
"""


def test_gpu_kernels_are_recorded_with_host_clock(tmp_path):
    script = ranks.write(tmp_path, SESSIONS)
    record = tmp_path / "record"
    ranks.run(script, "none", ranks=1, launcher=f"paceline --record {record}")
    (rank,) = load_run(record).records
    kernels = rank.events_in(State.KERNEL)
    assert kernels["amount"].sum() == 20
    forwards = rank.events_in(State.FORWARD)[20:40]
    assert len(kernels) == 20
    assert (kernels["start"] > forwards["start"] - 100_000).all()
    assert (kernels["end"] < forwards["end"] + 100_000).all()
    report = analyse(load_run(record))
    assert 0 < report.states[0]["useful"] < 1


def test_profiler_session_of_script_takes_precedence(tmp_path):
    script = ranks.write(tmp_path, SESSIONS)
    record = tmp_path / "record"
    result = ranks.run(script, "own", ranks=1, launcher=f"paceline --record {record}")
    assert result.stdout.count("own session saw addmm: True") == 2
    assert "the script runs a profiler, so Paceline records no GPU kernels" in result.stderr
    (rank,) = load_run(record).records
    assert not rank.on_gpu


def test_ranges_of_the_script_are_not_kernels():
    def event(name, is_range, device=DeviceType.CUDA):
        return SimpleNamespace(
            name=lambda: name,
            start_ns=lambda: 100,
            duration_ns=lambda: 10,
            device_type=lambda: device,
            is_user_annotation=lambda: is_range,
        )

    events = [
        event("nccl:all_reduce", True),
        event("ncclDevKernel_AllReduce", False),
        event("cudaLaunchKernel", False, DeviceType.CPU),
    ]
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    found = read_kernels(SimpleNamespace(profiler=results))
    assert found == [Kernel("ncclDevKernel_AllReduce", 100, 110)]


def test_sampling_begins_after_a_capture_and_in_a_resumed_run(monkeypatch):
    recorder = Recorder(0, 1, enabled=False)
    recorder.step = 5000  # of a checkpoint
    sampler = KernelSampler(recorder)
    calls = []
    monkeypatch.setattr(sampler, "_begin", lambda: calls.append("begin"))
    capturing = {sampled_steps.FIRST_SAMPLED_STEP}
    for step in range(1, 60):
        monkeypatch.setattr(sampled_steps, "is_capturing", lambda step=step: step in capturing)
        sampler.after_step()
        calls += [step] if calls == ["begin"] else []
    assert calls == ["begin", sampled_steps.FIRST_SAMPLED_STEP + 1]


def test_of_experiments_only_the_survey_samples_kernels(monkeypatch):
    recorder = Recorder(0, 1)
    assert sampler_of_run(None, recorder).first == sampled_steps.FIRST_SAMPLED_STEP
    assert sampler_of_run(Rung(5, 10, (EVERYTHING, CACHED)), recorder) is None
    survey = Rung(5, 10, (EVERYTHING,), survey_until=1.0)
    at = time.time_ns()
    sampler = sampler_of_run(survey, recorder)
    sampler._read = lambda _: [Kernel("gemm", at, at + 100)]
    monkeypatch.setattr(
        sampler, "_begin", lambda: setattr(sampler, "_profiler", SimpleNamespace(stop=int))
    )
    for _ in range(15):
        sampler.after_step()
    sampler.finish()
    assert not parse_record(recorder.snapshot()).on_gpu  # only measured steps so far
    for _ in range(4):
        sampler.after_step()
    sampler.finish()  # the survey ends before SAMPLED_STEPS
    assert parse_record(recorder.snapshot()).on_gpu
    sampler.finish()
