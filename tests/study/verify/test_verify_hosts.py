"""``paceline verify`` on several nodes."""

import json

import pytest
import ranks

SCRIPT = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    open("log.txt", "a").write("more")
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
"""
VERIFY = [ranks.PACELINE, "verify", "-H", "host1:1,host2:1", "--threads", "1", "--fresh"]


@pytest.mark.long
def test_folder_that_nodes_do_not_share_is_refused_before_the_script_runs(hosts, shared_folder):
    ranks.write(shared_folder, "raise SystemExit('the script ran')")
    done = hosts.run(
        "host0",
        *(*VERIFY, "script.py"),
        cwd=shared_folder,
        env={"TMPDIR": "/tmp"},
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "this node does not share the folder /tmp/paceline-verify-" in done.stderr
    assert "HINT: let TMPDIR be a folder that all nodes share" in done.stderr
    assert "the script ran" not in done.stderr


@pytest.mark.long
def test_ranks_of_two_nodes_are_compared_with_one(hosts, shared_folder):
    ranks.write(shared_folder, SCRIPT)
    (shared_folder / "log.txt").write_text("precious")
    done = hosts.run(
        "host0",
        *(*VERIFY, "--json", "answer.json", "script.py"),
        cwd=shared_folder,
        env={"TMPDIR": str(shared_folder)},
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (shared_folder / "log.txt").read_text() == "precious"
    found = json.loads((shared_folder / "answer.json").read_text())
    assert (found["ranks"], found["differences"]) == (2, 0)
    assert found["compared"]["replayed"] == found["compared"]["steps"] > 0
    names = ["answer.json", "log.txt", "script.py"]
    assert sorted(one.name for one in shared_folder.iterdir()) == names
