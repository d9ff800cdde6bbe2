"""One case of a pipeline, with Paceline or with torch.distributed.pipelining.

Arguments: "paceline" or "torch", and the name of a case. Rank 0 prints "outcome right" or "outcome
wrong": whether parameters and statistics equal those of one process that trains the same
micro-batches. An error ends the run, with its message.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  usual name
from torch.nn.modules.batchnorm import _BatchNorm

MICRO_BATCHES = 4


class Chain(nn.Module):
    """Four layers; ``kind`` adds a skip connection, tied weights or batch normalization."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind = kind
        self.first, self.a, self.b, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6) if kind == "norm" else nn.Identity()
        if kind == "tied":
            self.last.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.last(y + x if self.kind == "skip" else y)


class Named(nn.Module):
    """Two inputs by name."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, scale):
        return self.b(torch.tanh(self.a(x)) * scale)


def made(case):
    torch.manual_seed(1)
    if case == "dictionary":
        return Named()
    model = Chain(case if case in ("skip", "tied", "norm") else "")
    if case == "frozen":
        model.first.requires_grad_(False)
        model.a.requires_grad_(False)
    return model


def batches(case):
    """Return the batches: inputs and targets."""
    numbers = {"uneven": [7], "changing": [8, 6]}.get(case, [8, 8])
    generator = torch.Generator().manual_seed(2)
    for n in numbers:
        x, y, scale = (torch.randn(n, 6, generator=generator) for _ in range(3))
        yield ({"x": x, "scale": scale} if case == "dictionary" else x), y


def expected(case):
    """Return the state of one process after training."""
    model = made(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for inputs, targets in batches(case):
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        seen = {norm: [] for norm in norms}
        hooks = [
            m.register_forward_pre_hook(lambda m, x, s=seen: s[m].append(x[0].detach()))
            for m in norms
        ]
        before = [copy.deepcopy(m.state_dict()) for m in norms]
        for at in torch.arange(len(targets)).tensor_split(MICRO_BATCHES):
            if isinstance(inputs, dict):
                out = model(**{name: value[at] for name, value in inputs.items()})
            else:
                out = model(inputs[at])
            loss = F.mse_loss(out, targets[at]) * len(at) / len(targets)
            loss.backward()
        for hook in hooks:
            hook.remove()
        for norm, state in zip(norms, before, strict=True):
            x = torch.cat(seen[norm])
            norm.num_batches_tracked.copy_(state["num_batches_tracked"] + 1)
            norm.running_mean.copy_(state["running_mean"].lerp(x.mean(0), 0.1))
            norm.running_var.copy_(state["running_var"].lerp(x.var(0), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def with_paceline(case):
    import paceline

    world = paceline.init(progress=False, record=False)
    model = made(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    example, _ = next(iter(batches(case)))
    layout = f"pp{world.size} + micro-batches={MICRO_BATCHES}"
    model, optimizer = world.distribute(model, optimizer, layout=layout, example_inputs=example)
    if case == "evaluation":
        model.eval()
        model(torch.randn(8, 6))
        model.train()
    for inputs, targets in batches(case):
        world.forward_backward(model, inputs, targets, loss=F.mse_loss)
        world.step(optimizer)
    return dict(model.state_dict())


def with_torch(case):
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), made(case)
    inputs, _ = next(iter(batches(case)))
    begins = ["b"] if dist.get_world_size() == 2 else ["a", "last"]
    splits = dict.fromkeys(begins, SplitPoint.BEGINNING)
    if isinstance(inputs, dict):
        part = {name: value[:2] for name, value in inputs.items()}
        pipe = pipeline(model, (), mb_kwargs=part, split_spec=splits)
    else:
        pipe = pipeline(model, (inputs[:2],), split_spec=splits)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    module = stage.submod
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1) if trained else None
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=F.mse_loss)
    if case == "evaluation":
        module.eval()
        schedule.eval(*((torch.randn(8, 6),) if rank == 0 else ()))
        module.train()
    for inputs, targets in batches(case):
        args, options = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        if rank == 0:
            schedule.step(*args, **options)
        else:
            schedule.step(**({"target": targets} if rank == dist.get_world_size() - 1 else {}))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return dict(module.state_dict())


def main():
    side, case = sys.argv[1:]
    found = (with_paceline if side == "paceline" else with_torch)(case)
    wanted = expected(case)
    wrong = [
        name
        for name, value in found.items()
        if name not in wanted or not torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-5)
    ]
    count = torch.tensor([float(len(wrong))])
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        print("outcome", "wrong" if count.item() else "right", flush=True)


main()
