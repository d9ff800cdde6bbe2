"""The benchmarks run and write complete results; speed is not tested."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.bench
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KEYS = {"benchmark", "date", "machine", "settings", "measurements", "medians", "ratios", "targets"}


def started(name, *options):
    (script,) = BENCHMARKS.glob(f"*/{name}.py")
    command = [sys.executable, str(script), "--repeats", "1", *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def result_of(name, path, *options, more=(), timeout=300):
    process = started(name, "--json", str(path), *options)
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    result = json.loads(path.read_text())
    assert set(result) == KEYS.union(more)
    assert result["benchmark"] == name
    assert set(result["machine"]) == {"cores", "cpu", "platform", "python", "torch", "load"}
    assert result["settings"]["repeats"] == 1
    for target in result["targets"]:
        assert set(target) == {"claim", "limit", "value", "interval", "met", "decided"}
        assert target["met"] == (target["value"] <= target["limit"])
        assert (" MISSED: " in output) or target["met"]
    return result


def test_start_time(tmp_path):
    result = result_of("start_time", tmp_path / "out" / "start.json", "--ranks", "1")
    for launcher in ("paceline", "torchrun"):
        for what in ("first_step_s", "command_s"):
            assert len(result["measurements"]["1"][launcher][what]) == 1
            assert "median" in result["medians"]["1"][launcher][what]
    assert len(result["ratios"]["1"]["first_step_s"]["rounds"]) == 1
    assert len(result["targets"]) == 1


def test_horovod(tmp_path):
    result = result_of("horovod", tmp_path / "horovod.json", "--steps", "2")
    for model in ("digits", "mlp", "small tensors"):
        assert {len(one) for one in result["measurements"]["steps_s"][model].values()} == {1}
    assert len(result["targets"]) == 4


def test_model_calls(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    few = ("--seconds", "0.001", "--batches", "1,3", "--backends", "builtin,onnxruntime")
    result = result_of("model_calls", tmp_path / "calls.json", *few)
    for name in ("empty", "mlp", "unet", "transformer"):
        rows = result["measurements"]["per_call_s"][name]
        names = {"builtin", "onnxruntime", "onnxruntime by hand", "eager PyTorch"}
        assert {batch: set(row) for batch, row in rows.items()} == {"1": names, "3": names}
        assert result["measurements"]["exports"][name]["float64"]["builtin"]["error"] <= 1e-13


def test_native_robustness(tmp_path):
    few = ("--flips", "50", "--calls", "2000", "--thread-calls", "20", "--backends", "builtin")
    result = result_of("native_robustness", tmp_path / "robustness.json", *few)
    assert sum(result["measurements"]["flips"]["builtin"].values()) == 50
    assert all(goal["met"] for goal in result["targets"])


def test_rank_server(tmp_path):
    few = ("--ranks", "2", "--batches", "1", "--seconds", "0.01")
    result = result_of("rank_server", tmp_path / "server.json", *few)
    assert len(result["ratios"]) == 3


def test_solvers(tmp_path):
    if shutil.which("mpifort.openmpi") is None:
        pytest.skip("no mpifort. HINT: make test-packages")
    result = result_of("solvers", tmp_path / "solvers.json", "--steps", "100")
    assert [len(result["measurements"][name]["step"]) for name in ("heat", "transport")] == [50, 50]


def test_layout_time(tmp_path):
    few = ("--ranks", "2", "--width", "64", "--memory-width", "256")
    result = result_of("layout_time", tmp_path / "layouts.json", *few)
    for exchange in ("paceline", "gloo"):
        found = result["measurements"]["steps"][f"2 ranks, {exchange}"]
        assert {len(times) for times in found["step_s"].values()} == {1}
    assert set(result["measurements"]["memory"]["2"]) == {"data", "zero1", "zero2", "zero3"}


def test_spatial_time(tmp_path):
    few = ("--sizes", "16", "--width", "4", "--samples", "1")
    result = result_of("spatial_time", tmp_path / "spatial.json", *few)
    assert set(result["measurements"]["1 x 16^3"]["step_s"]) == {"whole", "parts", "waiting"}
    assert 0.5 < result["ratios"]["1 x 16^3"]["memory"] < 1


def test_spatial_peers(tmp_path):
    """Without ShardTensor's environment."""
    few = ("--size", "16", "--width", "4", "--steps", "1")
    result = result_of("spatial_peers", tmp_path / "peers.json", *few)
    assert set(result["measurements"]["verdicts"]["paceline"]) == {"right"}
    assert result["measurements"]["steps"]["2 x 16^3"]["paceline"]["peak_bytes"][0] > 0


def test_tensor_time(tmp_path):
    few = ("--width", "64", "--batch", "8", "--steps", "1")
    result = result_of("tensor_time", tmp_path / "tensor.json", *few)
    assert result["measurements"]["parameter_bytes"]["tp2, paceline"][0] > 0
    assert len(result["targets"]) == 2


def test_loaders(tmp_path):
    few = ("--images", "60", "--arrays", "20", "--epochs", "1", "--peers", "DataLoader, shards")
    result = result_of("loaders", tmp_path / "loaders.json", *few)
    for kind in ("images", "arrays"):
        names = {"work alone", "paceline", "DataLoader, shards"}
        assert set(result["measurements"][kind]) == names
        assert all(one[0]["cpu_s"] >= 0 for one in result["measurements"][kind].values())
    assert len(result["targets"]) == 4


def test_loader_storage(tmp_path):
    few = ("--megabytes", "20", "--samples", "1000", "--folder", str(tmp_path))
    result = result_of("loader_storage", tmp_path / "storage.json", *few)
    assert all(len(values) == 1 for values in result["measurements"].values())
    assert len(result["targets"]) == 2


def test_packing(tmp_path):
    few = ("--images", "40", "--arrays", "20", "--texts", "60", "--folder", str(tmp_path))
    path = tmp_path / "packing.json"
    result = result_of("packing", path, *few, "--peers", "nobody", "webdataset")
    for kind, least in (("images", 40), ("arrays", 20 * 691_200), ("texts", 60 * 1500)):
        writers = result["measurements"][kind]
        assert {"plain copy", "paceline", "paceline, no statistics"} <= set(writers)
        # No package of this name exists.
        assert not any(name.startswith("nobody") for name in writers)
        assert all(one[0]["bytes"] >= least for one in writers.values())
        assert all(one[0]["s"] >= one[0]["call_s"] > 0 for one in writers.values())
    assert not list(tmp_path.glob("tmp*"))


def test_staging(tmp_path):
    few = ("--megabytes", "20", "--samples", "50", "--folder", str(tmp_path))
    result = result_of("staging", tmp_path / "staging.json", *few)
    assert [len(ways) for ways in result["measurements"].values()] == [3, 3, 3, 3]
    assert all(one[0] > 0 for ways in result["measurements"].values() for one in ways.values())
    assert len(result["targets"]) == 8


def test_packing_ranks(tmp_path):
    few = ("--samples", "60", "--ms", "1", "--ranks", "2")
    result = result_of("packing_ranks", tmp_path / "packing.json", *few)
    assert len(result["measurements"]) == 3
    assert len(result["targets"]) == 1
    for ways in result["measurements"].values():
        assert {way: len(seconds) for way, seconds in ways.items()} == {"threads": 1, "2 ranks": 1}


def test_patches(tmp_path):
    few = ("--patches", "120", "--steps", "12", "--minutes", "0", "--folder", str(tmp_path))
    few += ("--memory", str(tmp_path))
    result = result_of("patches", tmp_path / "patches.json", *few, more=("prepared", "told"))
    steps = list(result["measurements"])
    assert [name[0] for name in steps] == list("12345")
    opened = [result["measurements"][name][0]["opened_a_sample"] for name in steps]
    assert min(opened[:2]) >= 24 > 1 > max(opened[2:])  # two patches of twelve files per sample
    assert len(result["targets"]) == 3


def test_step_time(tmp_path):
    path = tmp_path / "step.json"
    result = result_of("step_time", path, "--ranks", "1", "--steps", "30", "--warmup", "2")
    assert set(result["measurements"]) == set(result["medians"]) == set(result["ratios"])
    for runs in result["measurements"].values():
        assert [len(run) for run in runs] == [30]
    assert result["ratios"]["ddp view"]["median"] == 1
    assert len(result["targets"]) == 1


def test_recording_cost(tmp_path):
    result = result_of("recording_cost", tmp_path / "cost.json", "--quick")
    names = {"off", "recorded", "again", "profiler"}
    assert len(result["measurements"]) == 1  # one rank
    blocks = result["measurements"][0]["blocks"]
    assert {block["name"] for block in blocks} == names
    for block in blocks:
        assert [len(block[what]) for what in ("wall_us", "cpu_us")] == [3, 3]
        assert (block["events"] > 8) == (block["told_us"] > 0) == (block["name"] == "recorded")
    for what in ("wall_us", "cpu_us"):
        assert set(result["medians"][what]) == set(result["ratios"][what]) == names
        assert result["ratios"][what]["off"]["median"] == 1
    for what in ("events", "event_us", "told_us", "added_cpu_us"):
        assert "median" in result["medians"][what]
    assert len(result["targets"]) == 3


def test_report_size(tmp_path):
    result = result_of("report_size", tmp_path / "size.json", "--quick")
    assert len(result["measurements"]) == 1
    for what in ("seconds", "cpu_seconds", "gigabytes"):
        assert result["measurements"][0][what] > 0
        assert "median" in result["medians"][what]
    parts = result["medians"]["parts"]
    assert parts.keys() == result["measurements"][0]["parts"].keys()
    assert {"read", "match", "timelines", "replay", "losses", "groups"} < parts.keys()
    assert len(result["targets"]) == 2


def test_top_cost(tmp_path):
    result = result_of("top_cost", tmp_path / "top.json", "--quick")
    names = {"nobody", "top", "again", "every"}
    assert {block["name"] for block in result["measurements"]} == names
    for what in ("wall_us", "cpu_us"):
        assert set(result["medians"][what]) == set(result["ratios"][what]) == names
        assert all(block[what] > 0 for block in result["measurements"])
    assert result["medians"]["own_share"]["nobody"]["median"] == 0
    assert len(result["targets"]) == 4


def fault_times(name, path, fault="killed"):
    """Measure Paceline only, because torchrun's restarts on gloo may fail or take long."""
    result = result_of(name, path, "--faults", fault, "--launchers", "paceline", timeout=300)
    paceline = result["measurements"][fault]["paceline"]
    assert len(paceline["told_s"]) == len(paceline["again_s"]) == 1
    assert 0 < paceline["told_s"][0] < paceline["again_s"][0] < 60
    assert [target["limit"] for target in result["targets"]] == [1, 10]


def test_fault_times(tmp_path):
    fault_times("fault_times", tmp_path / "faults.json")


@pytest.mark.usefixtures("hosts")
def test_host_fault_times(tmp_path):
    fault_times("host_fault_times", tmp_path / "faults.json")


@pytest.mark.usefixtures("slurm", "mpi")
def test_strangers(tmp_path):
    few = ["--tools", "mpirun", "--idle", "100", "--garbage", "200"]
    result = result_of("strangers", tmp_path / "strangers.json", *few)
    for name in ("mpirun, alone", "mpirun, flooded"):
        assert len(result["measurements"][name]) == 1
        assert result["measurements"][name][0] > 0
    assert result["measurements"]["mpirun, garbage"][0] >= 200
    assert len(result["targets"]) == 1


@pytest.mark.usefixtures("hosts")
def test_exchange_hosts(tmp_path):
    few = ["--mbit", "1000", "--sizes", "1024", "65536", "--layers", "2"]
    result = result_of("exchange_hosts", tmp_path / "hosts.json", *few)
    assert len(result["measurements"].pop("overlap")["paceline 1"]) == 1
    for sizes in result["measurements"].values():
        assert all(
            len(each) == 1 and each[0] > 0 for way in sizes.values() for each in way.values()
        )
    assert [target["limit"] for target in result["targets"]] == [
        pytest.approx(one) for one in (1 / 1.4, 1 / 2.7, 1 / 3, 1 / 0.9, 0.3)
    ]


@pytest.mark.usefixtures("hosts")
def test_tuning(tmp_path):
    few = ("--mbit", "1000", "--each", "6", "--models", "large layers")
    result = result_of("tuning", tmp_path / "tuning.json", *few)
    (one,) = result["measurements"].values()
    assert set(one["seconds"]) == {"best", "tuned", "default"}
    assert len(one["sweep"]) == one["settings"] > 20
    assert 0 < one["tuner_steps"] < one["steps"]
    assert len(result["targets"]) == 3


@pytest.mark.usefixtures("hosts")
def test_unused(tmp_path):
    result = result_of("unused", tmp_path / "unused.json", "--steps", "2")
    assert {"plain", "search", "static", "map 120", "bits 120"} <= set(result["measurements"])
    assert all(len(each) == 1 and each[0] > 0 for each in result["measurements"].values())
    assert len(result["targets"]) == 1


def test_sockets(tmp_path):
    words = ["--ranks", "4", "--sizes", "65536", "1048576"]
    result = result_of("sockets", tmp_path / "sockets.json", *words)
    assert len(result["settings"]["sockets"]) > 1
    assert len(result["measurements"]) == 4
    assert all(len(each) == 1 and each[0] > 0 for each in result["measurements"].values())


def test_compression(tmp_path):
    result = result_of("compression", tmp_path / "less.json", "--epochs", "2")
    sent = {way: told["bytes_a_step"] for way, told in result["medians"].items()}
    assert min(sent.values()) > 0
    assert sent["bfloat16"] == pytest.approx(sent["all of it"] / 2, rel=0.05)
    assert all(len(told["losses"]) == 2 for told in result["medians"].values())


def test_convergence(tmp_path):
    few = ("--quick", "--runs", str(tmp_path / "runs.jsonl"))
    result = result_of("convergence", tmp_path / "found.json", *few)
    found = result["measurements"]
    assert len(found["points"]) == 9
    assert all(len(point["test"]) == 1 for point in found["points"].values())
    (case,) = found["predictions"]
    assert case["noise_scale"]["low"] > 0  # too few steps for more
    kept = (tmp_path / "runs.jsonl").read_text()
    again = result_of("convergence", tmp_path / "found.json", *few)
    assert again["measurements"] == found
    assert (tmp_path / "runs.jsonl").read_text() == kept  # nothing was trained again


def test_asynchronous(tmp_path):
    few = ("--target", "0.5", "--rates", "0.2", "--hosts", "one slow host")
    few += ("--runs", str(tmp_path / "runs.jsonl"))
    result = result_of("asynchronous", tmp_path / "found.json", *few)
    for way in result["measurements"].values():
        assert len(way["runs"]) == 1
        assert way["runs"][0]["reached"]


def test_norm_time(tmp_path):
    result = result_of("norm_time", tmp_path / "found.json", "--steps", "2", "--batch", "8")
    exchanges = result["measurements"]["exchanges_a_layer"]
    assert exchanges["sync"] == exchanges["sync uneven"] == 2
    assert exchanges["local"] == exchanges["ghost:8"] == exchanges["group:8"] == 0


def test_norm_neighbours(tmp_path):
    result = result_of("norm_neighbours", tmp_path / "found.json", "--exchanges", "5")
    networks = result["measurements"]["networks"]
    assert networks["ResNet-50"] == {"norms": 53, "chain": 49}
    assert networks["DenseNet-121"] == {"norms": 121, "chain": 121}
    assert result["medians"]["fused"]["median"] > 0


def test_noise_scale_cost(tmp_path):
    few = ("--steps", "30", "--pairs", "10")
    result = result_of("noise_scale_cost", tmp_path / "found.json", *few)
    (one,) = result["measurements"]
    assert one["interval"] >= 1
    assert one["step_us"] > one["call_us"] > 0


def test_binding(tmp_path):
    result = result_of(
        "binding", tmp_path / "binding.json", "--steps", "20", "--ways", "paceline, a core each"
    )
    assert len(result["measurements"]) == 2
    assert all(times[0] > 0 for times in result["measurements"].values())
    assert result["ratios"]["torchrun"]["median"] == 1


def test_interrupted_benchmark_ends_its_child_processes(tmp_path):
    path = tmp_path / "step.json"
    process = started("step_time", "--json", str(path), "--steps", "1000000")
    child = launched_by(process.pid)
    started_here = ranks.family(process.pid)
    try:
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    except BaseException:
        for pid in started_here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    assert process.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert not path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def launched_by(pid):
    """Return the PID of the process's child that launches a benchmark script, once it exists."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            try:
                if b"scripts/" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
            except OSError:
                pass  # the child has ended already
        time.sleep(0.01)
    raise TimeoutError


def test_checkpoint_io(tmp_path):
    few = ("--ranks", "2", "--mib", "8", "--folder", str(tmp_path))
    result = result_of("checkpoint_io", tmp_path / "io.json", *few)
    assert set(result["ratios"]) == {"save", "load", "step"}
    assert len(result["measurements"]["save"]) == 1
    assert len(result["targets"]) == 3


def test_unseen(tmp_path):
    script, path = BENCHMARKS / "scorecard" / "unseen.py", tmp_path / "unseen.json"
    words = ["--cases", "1", "--kinds", "barriers", "--scripts", "surrogate", "--minutes", "0.2"]
    words += ["--trials", "1", "--rounds", "1"]
    for more in ([], ["--resume"]):
        done = subprocess.run(
            [sys.executable, script, *words, *more, "--json", path],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ended with a diagnosis" in done.stdout
    (case,) = json.loads(path.read_text())["cases"]
    assert case["error"] == ""
    assert case["ended"]
    assert case["amount"] >= 1
    assert case["lines"]["common.py"]


def test_battery(tmp_path):
    script, path = BENCHMARKS / "verify" / "battery.py", tmp_path / "battery.json"
    words = ["--only", "gradients-summed/communication-hook,cnn_ddp", "--json", path]
    for more in ([], ["--resume"]):
        done = subprocess.run(
            [sys.executable, script, *words, *more], capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "right script accused" in done.stdout
    result = json.loads(path.read_text())
    assert {case["name"] for case in result["cases"]} == {
        "gradients-summed/communication-hook",
        "cnn_ddp",
    }
    assert all(case["ended"] for case in result["cases"]), done.stdout
    assert result["figures"]["named"] == {"hits": 1, "of": 1, "low": 0.207, "high": 1.0}
    assert result["figures"]["accused_right"]["hits"] == 0


def test_recomputation(tmp_path):
    few = ("--blocks", "4", "--width", "32", "--searched", "2")
    result = result_of("recomputation", tmp_path / "recomputation.json", *few)
    assert set(result["medians"]) == {"plain", "auto"}
    assert len(result["measurements"]["search"]) == 9
    assert len(result["targets"]) == 4


def test_memory_prediction(tmp_path):
    result = result_of("memory_prediction", tmp_path / "peaks.json", "--models", "mlp", "graph")
    assert set(result["ratios"]) == {"mlp", "graph"}
    assert all(0.5 < one["median"] < 2 for one in result["ratios"].values())
    assert len(result["targets"]) == 2


def test_memory_of_layouts(tmp_path):
    few = ("--ranks", "2", "--models", "perceptron")
    result = result_of("memory_of_layouts", tmp_path / "layouts.json", *few)
    layouts = ("data", "zero1", "zero2", "zero3")
    assert set(result["ratios"]) == {f"perceptron, {name}, 2 ranks" for name in layouts}
    assert len(result["targets"]) == 8


def test_peers(tmp_path):
    """Without --python no peer is installed: only Paceline runs."""
    few = ("--width", "64", "--batch", "8")
    result = result_of("peers", tmp_path / "peers.json", *few)
    found = result["measurements"]["paceline"]
    assert set(found["step_s"]) == {"zero1", "zero2", "zero3"}
    assert all(len(times) == 1 for times in found["step_s"].values())


def test_guard(tmp_path):
    few = ("--healthy", "1", "--faults", "1", "--real", "0", "--tasks", "waves", "--epochs", "1")
    result = result_of("guard", tmp_path / "guard.json", *few, more={"real_runs"})
    assert [case["fault"] for case in result["measurements"]] == ["none", "rate"]
    assert result["measurements"][1]["told_at"] > result["measurements"][1]["at"]


def test_duration_of_verify(tmp_path):
    result = result_of("duration", tmp_path / "duration.json", "--ranks", "2")
    assert list(result["medians"]) == ["2"]
    assert result["measurements"]["step_s"] > 0
    assert len(result["targets"]) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("gpu_recording_cost", "gpu_layout_memory", "gpu_roofline", "gpu_recomputation"),
        "gpu_loaders",
    ],
)
def test_measurements_of_a_gpu_run_on_the_cpu(tmp_path, name):
    options = ("--device", "cpu", "--quick", "--seconds", "100")
    result = result_of(name, tmp_path / "found.json", *options)
    assert result["measurements"]
    assert result["medians"] or result["ratios"]


def test_planted_laws(tmp_path):
    few = ("--only", "strong-fixed-1", "--folder", str(tmp_path / "studies"))
    result = result_of("planted_laws", tmp_path / "laws.json", *few, more=["seconds"])
    cases = {"strong-fixed-1", "strong-fixed-1.6"}
    assert set(result["measurements"]) == cases
    assert all(one["planted"] == ["fixed-cost"] for one in result["measurements"].values())
    again = result_of("planted_laws", tmp_path / "laws.json", *few, more=["seconds"])
    assert again["measurements"] == result["measurements"]  # runs are not repeated


def test_next_size(tmp_path):
    few = ("--only", "local-weak-slow", "--folder", str(tmp_path / "studies"))
    result = result_of("next_size", tmp_path / "next.json", *few, more=["seconds", "inside"])
    (one,) = result["measurements"].values()
    assert set(one["samples_s"]) == {"1", "2", "4", "8"}
    assert all(model["seconds_before"] > 0 for model in one["models"].values())


def test_study_overhead(tmp_path):
    short = ("--repeats", "1", "--minutes", "0.8")
    result = result_of("study_overhead", tmp_path / "overhead.json", *short, more=["seconds"])
    (one,) = result["measurements"]
    assert one["count"] >= 2
    parts = one["before"] + one["between"] + one["after"] + one["runs"]
    assert parts == pytest.approx(one["total"])
    assert min(one["before"], one["between"], one["after"]) > 0


def test_trial_cost_measures_trials_memory_and_opening(tmp_path):
    sizes = ("--trials", "6", "--memory-trials", "6", "--open-trials", "50")
    result = result_of("trial_cost", tmp_path / "x.json", *sizes)
    measured = result["measurements"]
    assert set(measured) == {"paceline_s", "plain_s", "open_s", "memory_mib"}
    assert all(value > 0 for values in measured.values() for value in values)
    assert len(result["targets"]) == 3


def test_kills_lose_no_trial(tmp_path):
    result = result_of("kills", tmp_path / "x.json", "--kills", "3", "--trials", "12")
    assert result["measurements"]["lost"] == result["measurements"]["twice"] == [0]


def test_pipeline_idle(tmp_path):
    few = ("--stages", "2", "--micro-batches", "4")
    result = result_of("pipeline_idle", tmp_path / "idle.json", *few, more={"formula"})
    names = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    assert set(result["measurements"]) == {f"{name}, 2 stages, 4 micro-batches" for name in names}


def test_pipeline_speed(tmp_path):
    few = ("--schedules", "1f1b", "--micro-batches", "4", "--steps", "1", "--width", "32")
    result = result_of("pipeline_speed", tmp_path / "speed.json", *few, "--layers", "4")
    assert set(result["measurements"]) == {"one process", "both cores", "1f1b 4"}


def test_pipeline_memory(tmp_path):
    few = ("--models", "transformer", "--layouts", "pp2")
    result = result_of("pipeline_memory", tmp_path / "memory.json", *few)
    assert set(result["ratios"]) == {f"transformer, pp2, stage {n}" for n in range(2)}


def test_pipeline_cases(tmp_path):
    few = ("--cases", "skip", "tied")
    result = result_of("pipeline_cases", tmp_path / "cases.json", *few)
    assert [one["paceline"] for one in result["measurements"].values()] == [
        {"outcome": "right"}
    ] * 2
