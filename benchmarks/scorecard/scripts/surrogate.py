#!/usr/bin/env python
# Surrogate of a chemistry solver: MLP on tables from a generator of numpy batches.
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

N_IN, N_OUT, N_HIDDEN, N_BATCH = 24, 12, 192, 3072


def sample_states(rng):
    state = rng.random((N_BATCH, N_IN), dtype=np.float32)
    # <sample x=state i=0>
    rates = np.exp(-1.0 / (0.2 + state[:, :N_OUT])) * state[:, N_OUT:]
    return torch.from_numpy(state), torch.from_numpy(rates)


def stream(rng, n):
    for _ in range(n):
        yield sample_states(rng)


class Surrogate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [N_IN, N_HIDDEN, N_HIDDEN, N_HIDDEN, N_HIDDEN]
        self.hidden = torch.nn.ModuleList(
            torch.nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.last = torch.nn.Linear(N_HIDDEN, N_OUT)

    def forward(self, s):
        for fc in self.hidden:
            s = torch.tanh(fc(s))
        # <forward h=s>
        return self.last(s)


def run():
    dist.init_process_group(backend="gloo")
    me, n_ranks = dist.get_rank(), dist.get_world_size()
    # <start rank=me world=n_ranks>
    torch.manual_seed(42)
    plain = Surrogate()
    # <model model=plain>
    net = DistributedDataParallel(plain)
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(optim, 1000, 0.5)
    rng = np.random.default_rng(me)
    running = torch.zeros(())
    for n, (state, rates) in enumerate(stream(rng, 200_000), start=1):
        # <batch x=state>
        predicted = net(state)
        loss = torch.nn.functional.smooth_l1_loss(predicted, rates)
        # <loss loss=loss model=plain again=plain(state) x=state>
        optim.zero_grad()
        loss.backward()
        # <backward model=plain loss=loss>
        optim.step()
        sched.step()
        running += loss.detach()
        # <step model=plain optimizer=optim loss=loss step=n rank=me again=plain(state)>
        if n % 500 == 0:
            if me == 0:
                print(n, running.item() / 500)
            running.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
