"""Recorded norms of gradients: of each rank's samples, relative to that of all ranks' samples."""

import ast

import numpy as np
import pytest
import ranks

from paceline.analyze.figures.noise_scale import MIN_SAMPLED_STEPS
from paceline.analyze.records.load_run import load_run
from paceline.record.ring.states import SQUARE_OFFSET, SQUARE_UNIT, State

SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    kind, accumulate = sys.argv[1], int(sys.argv[2])
    if kind == "world":
        import paceline
        world = paceline.init(seed=1, progress=False)
    else:
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    if kind == "norm":
        from paceline.optim.norms import convert_norms
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), *model)
        convert_norms(model, "sync")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if kind == "world":
        model, optimizer = world.distribute(
            model, optimizer, accumulate=accumulate, layout=sys.argv[3])
    else:
        model = DistributedDataParallel(model)
        if kind == "hook":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
            state = power.PowerSGDState(None, start_powerSGD_iter=2)
            model.register_comm_hook(state, power.powerSGD_hook)

    def loss_of(model, x):
        return (model(x)[:, 0] - x.sum(1)).square().mean()

    x = torch.randn(24 * accumulate, 4, 6, generator=torch.Generator().manual_seed(rank))
    batches = DataLoader(TensorDataset(x.reshape(-1, 6)), batch_size=4)
    if kind == "world":
        batches = world.batches(batches)
    if kind == "scaled":  # the scale doubles in every step
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    norms, group = {}, []
    for i, (x,) in enumerate(batches):
        last = i % accumulate == accumulate - 1
        if kind == "world":
            world.backward(loss_of(model, x))
            world.step(optimizer, clip=0.01)
        else:
            model.require_backward_grad_sync = last
            loss = loss_of(model, x) / accumulate
            (scaler.scale(loss) if kind == "scaled" else loss).backward()
            if last and kind == "scaled":
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            elif last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        group.append(x)
        if last:
            own = torch.autograd.grad(loss_of(plain, torch.cat(group)), plain.parameters())
            own, group = torch.cat([g.flatten() for g in own]), []
            mean = own.clone()
            dist.all_reduce(mean)
            norms[i // accumulate] = own.square().sum().item(), (mean / size).square().sum().item()
    if kind == "world":
        found = world.noise_scale()
        print("NOISE", None if found is None else found.steps)
    print("NORMS", norms)
"""


def recorded(folder, *words):
    """Return each rank's recorded norms, and those that it computed, by step."""
    script = ranks.write(folder, SCRIPT)
    record = folder / "record"
    out = ranks.run(script, *words, launcher=f"paceline --record {record}").stdout
    lines = [line for line in ranks.untagged(out) if line.startswith("NORMS")]
    told = [ast.literal_eval(line[6:]) for line in lines]
    found = []
    for one in sorted(load_run(record).records, key=lambda r: r.rank):
        events = one.events_in(State.GRADIENT)
        values = np.exp2(events["amount"] / SQUARE_UNIT - SQUARE_OFFSET)
        pairs: dict[int, list[float]] = {}
        for event, value in zip(events, values, strict=True):
            pairs.setdefault(int(event["seq"]) - 1, []).append(float(value))
        found.append(pairs)
    return found, told, out


@pytest.mark.parametrize(
    "words",
    [("ddp", 1), ("ddp", 2), ("scaled", 2), ("world", 2, "data"), ("world", 1, "zero3")],
    ids=lambda words: "-".join(map(str, words)),
)
def test_norms_are_those_before_clipping_of_whole_steps(tmp_path, words):
    found, told, out = recorded(tmp_path, *words)
    common = sorted(set(found[0]) & set(found[1]))
    assert common  # how many depends on what they cost
    factors = [sum(rank[step][1] for rank in found) / told[0][step][1] for step in common]
    assert factors == pytest.approx([factors[0]] * len(factors), rel=1e-4)  # same weight
    for step in common:
        # DDP divides before the exchange: norms have a common factor, which the scale has not
        whole = sum(rank[step][1] for rank in found) / told[0][step][1]
        own = sorted(rank[step][0] / whole for rank in found)
        assert own == pytest.approx(sorted(rank[step][0] for rank in told), rel=1e-4)
    if words[0] == "world" and len(common) >= MIN_SAMPLED_STEPS:
        assert f"NOISE {len(common)}" in ranks.untagged(out)


def test_exchange_of_a_norm_in_the_backward_is_not_taken_for_a_gradient(tmp_path):
    found, _, _ = recorded(tmp_path, "norm", 1)
    assert set(found[0]) & set(found[1])


def test_compressed_gradients_are_not_taken_for_gradients(tmp_path):
    found, _, _ = recorded(tmp_path, "hook", 1)
    assert found == [{}, {}]
