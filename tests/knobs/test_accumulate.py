"""The knob accumulate-locally with loss scaling, whose scaler may skip steps."""

import ranks
import torch

from paceline.knobs.settings import Setting, write_settings

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
    skipped_step = int(sys.argv[2])
    for step, backwards in enumerate((2, 2, 2, int(sys.argv[3]), 2)):
        for i in range(backwards):
            loss = model(torch.randn(16, 8)).square().mean()
            if step == skipped_step and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print("scale", scaler.get_scale(), flush=True)
    torch.save(list(net.parameters()), f"{sys.argv[1]}-{dist.get_rank()}")
    dist.destroy_process_group()
    """


def run(folder, *args):
    settings = folder / "settings.toml"
    write_settings(settings, {"accumulate-locally": Setting(True)}, {})
    launcher = f"paceline --settings {settings}"
    script = ranks.write(folder, SCALED)
    done = ranks.run(script, folder / "out", *args, launcher=launcher, timeout=60)
    assert ranks.untagged(done.stdout) == {"scale 32768.0"}  # the same step is skipped on all ranks
    one, other = (torch.load(folder / f"out-{rank}") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return done.stderr


def test_missing_exchange_is_done_before_the_scaler_looks_for_infinite_gradients(tmp_path):
    assert "fewer backwards" in run(tmp_path, 3, 1)


def test_skipped_step_does_not_change_the_number_of_backwards(tmp_path):
    assert "fewer backwards" not in run(tmp_path, 2, 2)
