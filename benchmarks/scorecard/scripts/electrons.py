"""Variational Monte Carlo: electrons move by Metropolis steps; gradients are exchanged by hand."""

import argparse

import torch
import torch.distributed as dist

ELECTRONS, WALKERS, MOVES = 8, 320, 4


class Jastrow(torch.nn.Module):
    """Logarithm of a wave function: one-electron part and a sum over electron pairs."""

    def __init__(self, width=48):
        super().__init__()
        self.one = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        self.two = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, width),
            torch.nn.Tanh(), torch.nn.Linear(width, 1),
        )  # fmt: skip
        pairs = torch.combinations(torch.arange(ELECTRONS))
        self.register_buffer("i", pairs[:, 0])
        self.register_buffer("j", pairs[:, 1])

    def forward(self, r):
        radius = r.norm(dim=-1, keepdim=True)
        apart = (r[:, self.i] - r[:, self.j]).norm(dim=-1, keepdim=True)
        pair = torch.cat([apart, apart / (1 + apart)], -1)
        # <forward h=pair>
        return (self.one(r) - radius).sum((1, 2)) + self.two(pair).sum((1, 2))


def metropolis(psi, r, moves):
    with torch.no_grad():
        log_p = 2 * psi(r)
        for _ in range(moves):
            trial = r + 0.3 * torch.randn_like(r)
            log_trial = 2 * psi(trial)
            accept = torch.rand(len(r)).log() < log_trial - log_p
            r = torch.where(accept[:, None, None], trial, r)
            log_p = torch.where(accept, log_trial, log_p)
    return r


def local_energy(r):
    potential = -ELECTRONS / r.norm(dim=-1).clamp(min=0.1)
    repulsion = 1 / torch.cdist(r, r).clamp(min=0.1).triu(1).sum((1, 2))
    return potential.sum(1) + repulsion


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    # <start rank=dist.get_rank() world=dist.get_world_size()>
    psi = Jastrow()
    # <model model=psi>
    for p in psi.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(psi.parameters(), lr=1e-3)
    r = torch.randn(WALKERS, ELECTRONS, 3)
    for it in range(args.iterations):
        r = metropolis(psi, r, MOVES)
        # <batch x=r>
        energy = local_energy(r)
        centred = energy - energy.mean()
        loss = 2 * (centred * psi(r)).mean()
        # <loss loss=loss model=psi again=psi(r) x=r>
        opt.zero_grad()
        loss.backward()
        # <backward model=psi loss=loss>
        flat = torch.nn.utils.parameters_to_vector([p.grad for p in psi.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        torch.nn.utils.vector_to_parameters(flat, [p.grad for p in psi.parameters()])
        opt.step()
        # <step model=psi optimizer=opt loss=loss step=it rank=dist.get_rank() again=psi(r)>
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=100_000)
    main(parser.parse_args())
