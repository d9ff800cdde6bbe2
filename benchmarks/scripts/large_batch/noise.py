"""Steps of plain SGD to a loss, and the gradient noise scale on the way there."""

import math
from typing import Any

import torch
from tasks import Task, build_model, load_task
from torch import nn

RANKS = 4  # parts of a batch whose gradients are compared, as those of ranks are
SAMPLED = 4  # steps from one sample of the noise scale to the next
JUDGED_ROWS = 1024  # of the validation data
SPACING = 0.05  # of the steps between two evaluations, relative


def steps_to(
    task: str,
    model: str,
    target: float,
    batch: int,
    lr: float,
    seed: int,
    limit: float,
    has_norms: bool,
) -> dict[str, Any]:
    """Train with a constant learning rate until the validation loss reaches a target.

    Returns:
        ``steps``, interpolated between two evaluations; None: more than ``limit``, or diverged.
        ``norms``, with ``has_norms``: of sampled steps, what ``estimate_noise_scale`` needs of
        each rank.
    """
    data = load_task(task)
    torch.manual_seed(seed)
    net = build_model(task, model)
    optimizer = torch.optim.SGD(net.parameters(), lr)
    order = torch.Generator().manual_seed(seed)
    judged = type(data.validation)(data.validation.x[:JUDGED_ROWS], data.validation.y[:JUDGED_ROWS])
    rows: list[torch.Tensor] = []
    norms: list[list[list[float]]] = []
    before, due, step = (0, data.error(net, judged)[0]), 1, 0
    while step < limit:
        if not rows:
            mixed = torch.randperm(len(data.train), generator=order)
            rows = list(mixed[: len(mixed) // batch * batch].split(batch))
        optimizer.zero_grad()
        part = rows.pop()
        if has_norms and step % SAMPLED == 0:
            norms.append(_backward_in_parts(data, net, part))
        else:
            data.loss(net(data.train.x[part]), data.train.y[part]).backward()
        optimizer.step()
        step += 1
        if step >= due:
            loss = data.error(net, judged)[0]
            if not math.isfinite(loss):
                break
            if loss <= target:
                share = (before[1] - target) / (before[1] - loss)
                return {"steps": before[0] + share * (step - before[0]), "norms": norms}
            before, due = (step, loss), step + max(1, round(SPACING * step))
    return {"steps": None, "norms": []}


def _backward_in_parts(data: Task, net: nn.Module, rows: torch.Tensor) -> list[list[float]]:
    """Compute the gradient of a batch as ranks do.

    Returns:
        For each rank: samples, squared norm of its gradient, and its part of that of all ranks.
    """
    parameters = list(net.parameters())
    means = [torch.zeros_like(parameter) for parameter in parameters]
    found = []
    for part in rows.chunk(RANKS):
        loss = data.loss(net(data.train.x[part]), data.train.y[part])
        gradients = torch.autograd.grad(loss, parameters)
        found.append([len(part), _square(gradients)])
        torch._foreach_add_(means, gradients, alpha=1 / RANKS)
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    of_all = _square(means) / RANKS
    return [[*of_rank, of_all] for of_rank in found]


def _square(tensors: Any) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).square().sum())
