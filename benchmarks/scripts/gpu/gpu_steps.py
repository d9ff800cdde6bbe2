"""Steps on one device that are recorded and not recorded in turns, for
benchmarks/gpu/gpu_recording_cost.py. Arguments: file, and the settings as JSON.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recording"))
import torch
from recorded_steps import Recording
from torch import nn

WARM_UP_STEPS = 60  # the kernels of steps 20 to 39 are sampled, which is not measured here


def made(width: int, device: torch.device) -> tuple[nn.Module, Any]:
    """Return a perceptron and its optimizer."""
    layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    is_gpu = device.type == "cuda"
    return model, torch.optim.AdamW(model.parameters(), fused=is_gpu, capturable=is_gpu)


def stepper(mode: str, width: int, batch: int, device: torch.device) -> Any:
    """Return a function that does one training step."""
    model, optimizer = made(width, device)
    x = torch.randn(batch, width, device=device)
    forward = torch.compile(model) if mode == "compiled" else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(x).float().square().mean()
        loss.backward()
        optimizer.step()

    if mode != "graph":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Any, steps: int, device: torch.device) -> tuple[float, float]:
    """Return wall time and time of the main thread of a step, in microseconds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        step()
    cpu = time.thread_time() - cpu
    wait()
    return (time.perf_counter() - start) / steps * 1e6, cpu / steps * 1e6


def main(path: str, asked: dict[str, Any]) -> None:
    """Measure each mode, and write the times of its blocks."""
    device = torch.device(asked["device"])
    recording = Recording()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    batch = asked["batch"]
    for number, mode in enumerate(asked["modes"]):
        began = time.time()
        share = (asked["end"] - began) / (len(asked["modes"]) - number)
        if share < 1:
            found[mode] = {"batch": batch, "error": "no time left"}
            continue
        blocks: dict[str, list[list[float]]] = {"off": [], "recorded": [], "again": []}
        try:
            step = stepper(mode, asked["width"], batch, device)
            if mode == "eager":  # as large as to take the wanted time
                while timed(step, 5, device)[0] < asked["step_us"] and batch < 1 << 17:
                    batch *= 2
                    step = stepper(mode, asked["width"], batch, device)
            for on in (True, False):
                recording.switch(on)
                timed(step, WARM_UP_STEPS if on and device.type == "cuda" else 5, device)
            names = list(blocks)
            for turn in range(asked["rounds"]):
                for name in names if turn % 2 else names[::-1]:
                    recording.switch(name == "recorded")
                    timed(step, 2, device)
                    blocks[name].append(list(timed(step, asked["steps"], device)))
                if time.time() - began > share and turn >= 2:
                    break
            found[mode] = {"batch": batch, "blocks": blocks}
        except Exception as error:  # the other modes are measured all the same
            found[mode] = {"batch": batch, "error": f"{type(error).__name__}: {error}"[:800]}
        recording.switch(True)
        print(mode, {n: statistics.median(b[0] for b in v) for n, v in blocks.items() if v})
        Path(f"{path}.new").write_text(json.dumps(found))
        Path(f"{path}.new").rename(path)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
