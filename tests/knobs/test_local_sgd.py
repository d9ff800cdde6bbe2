"""The knob average-every with checkpoints, validation and loss scaling."""

import ranks
import torch

from paceline.checkpoint.saver import load_checkpoint
from paceline.knobs.settings import Setting, write_settings

WORLD = """
    import sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    out = sys.argv[1]
    world = paceline.init(progress=False)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = world.distribute(net, optimizer)
    loader = world.shard(DataLoader(TensorDataset(torch.randn(120, 4)), batch_size=6))
    validation = world.shard(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4),
                             every_sample_once=True)
    folder = None if "epoch" in sys.argv else out + ".ckpt"
    for epoch in world.epochs(1, checkpoint=folder, every=7):
        for i, (x,) in enumerate(world.batches(loader)):
            if i == 7:  # 4 steps with exchanged gradients, then 3 without; saved just now
                state = [p.detach().clone() for p in net.parameters()]
                momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in net.parameters()]
                torch.save(state + momentum, f"{out}-{world.rank}")
            world.backward((model(x) - x[:, :1]).square().mean())
            world.step(optimizer)
        torch.save([p.detach() for p in net.parameters()], f"{out}-{world.rank}-trained")
        if "epoch" in sys.argv:
            continue
        for (x,) in world.batches(validation):
            torch.save([p.detach() for p in net.parameters()], f"{out}-{world.rank}-validated")
    torch.save([p.detach() for p in net.parameters()], f"{out}-{world.rank}-left")
    print("done")
    """


def run(folder, script, *args, **options):
    settings = folder / "settings.toml"
    write_settings(settings, {"average-every": Setting(5)}, {})
    launcher = f"paceline --settings {settings}"
    return ranks.run(ranks.write(folder, script), *args, launcher=launcher, **options)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_checkpoint_and_validation_use_the_average_of_the_ranks(tmp_path):
    out = tmp_path / "out"
    done = run(tmp_path, WORLD, out)
    assert "done" in done.stdout
    assert "differ" not in done.stderr
    one, other = (torch.load(tmp_path / f"out-{rank}") for rank in range(2))
    assert equal(one, other)
    shared, _, _ = load_checkpoint(tmp_path / "out.ckpt/step-00000007")
    saved = [*shared["models"][0].values()]
    saved += [state["momentum_buffer"] for state in shared["optimizers"][0]["state"].values()]
    assert equal(saved, one)
    trained = [torch.load(tmp_path / f"out-{rank}-trained") for rank in range(2)]
    validated = [torch.load(tmp_path / f"out-{rank}-validated") for rank in range(2)]
    assert not equal(*trained)
    assert equal(*validated)


def test_ranks_have_the_average_after_an_epoch(tmp_path):
    run(tmp_path, WORLD, tmp_path / "out", "epoch")
    for name, is_equal in (("trained", False), ("left", True)):
        assert is_equal == equal(*(torch.load(tmp_path / f"out-{r}-{name}") for r in range(2)))


SCALED = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(1 + dist.get_rank())
    for step in range(4 + 2 * 5):
        loss = model(torch.randn(16, 8)).square().mean()
        if step == 6 and dist.get_rank() == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print("scale", scaler.get_scale(), flush=True)
    torch.save(list(net.parameters()), f"{sys.argv[1]}-{dist.get_rank()}")
    dist.destroy_process_group()
    """


def test_steps_that_loss_scaling_skips_on_one_rank_keep_the_averages_together(tmp_path):
    done = run(tmp_path, SCALED, tmp_path / "out", timeout=60)
    assert {"scale 65536.0", "scale 32768.0"} <= ranks.untagged(done.stdout)
    one, other = (torch.load(tmp_path / f"out-{rank}") for rank in range(2))
    assert equal(one, other)
