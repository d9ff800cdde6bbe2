"""paceline diagnose names the user's own line: three kinds of faults inside of functions."""

import json
import subprocess

import pytest
import ranks

pytestmark = [pytest.mark.alone, pytest.mark.long]

SCRIPT = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    FAULT = sys.argv[1]

    class Numbers(Dataset):
        def __len__(self):
            return 100_000
        def __getitem__(self, i):
            return torch.full((16,), float(self.read(i)))
        def read(self, i):
            if FAULT != "file":
                return i % 7
            with open("whole.bin", "rb") as file:
                content = file.read()  # the fault "file"
            return content[i]

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 64), nn.Linear(64, 1)
        def weight(self, nodes):
            total = 0.0
            for node in range(nodes):
                total += 1.0 / (1 + node % 5)  # the fault "loop"
            return total / nodes
        def forward(self, x):
            h = self.enter(x).relu()
            if FAULT == "loop":
                h = h * self.weight(200_000)
            return self.leave(h)

    def summarize(model, step):
        values = []
        for _ in range(200_000):
            values.append(step * 0.5)  # the fault "rank"
        return sum(values)

    def main():
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(Graph())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        step = 0
        for x in DataLoader(Numbers(), 16):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if FAULT == "rank" and dist.get_rank() == 1 and step % 3 == 0:
                summarize(model, step)

    main()
"""


@pytest.mark.parametrize(
    ("fault", "doing", "ids"),
    [
        ("loop", "python", {"line"}),
        ("file", "file", {"input-bandwidth", "input-waiting", "input-preprocessing"}),
        ("rank", "python", {"slow-rank"}),
    ],
)
def test_line_of_a_fault_inside_of_a_function_is_named(tmp_path, fault, doing, ids):
    (tmp_path / "whole.bin").write_bytes(bytes(4_000_000))
    script = ranks.write(tmp_path, SCRIPT)
    command = ["diagnose", "-n", "2", "--threads", "1", "--minutes", "0.2", "--steps", "24"]
    done = subprocess.run(
        [ranks.PACELINE, *command, "--json", str(script), fault],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ranks.environment(),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    source = script.read_text().splitlines()
    (number,) = [n for n, line in enumerate(source, 1) if f'the fault "{fault}"' in line]
    near = range(number - 1, number + 1)
    own = [one for one in found["lines"] if not one["in_workers"]]
    # Of the lines that do not only call torch or wait for the other rank.
    busy = [one for one in own if not {"torch", "collective"} & set(list(one["doing"])[:1])]
    assert busy[0]["line"] in near, own[:5]
    assert doing in busy[0]["doing"]
    cause = next(one for one in found["causes"] if one["id"] in ids)
    lines = cause["evidence"].get("loader_lines") or cause["evidence"]["lines"]
    assert lines[0]["line"] in near
    if fault == "rank":
        assert cause["evidence"]["rank"] == 1
        assert busy[0]["ranks"]["0"] == 0
        assert busy[0]["waited_for"]["1"] > 0
