"""Forecast of sensor readings: dilated convolutions over windows of an IterableDataset."""

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WINDOW, HORIZON, SENSORS = 96, 8, 6


class Windows(IterableDataset):
    """Endless random windows of a long series; each rank and worker has its own seed."""

    def __init__(self, length=100_000):
        time = np.arange(length, dtype=np.float32)[:, None]
        self.series = np.sin(time * np.linspace(0.01, 0.2, SENSORS, dtype=np.float32))

    def __iter__(self):
        worker = get_worker_info()
        seed = 1000 * distributed.get_rank() + (worker.id if worker else 0)
        rng = np.random.default_rng(seed)
        while True:
            at = int(rng.integers(len(self.series) - WINDOW - HORIZON))
            window = self.series[at : at + WINDOW + HORIZON]
            # <sample x=window i=at>
            yield window[:WINDOW].T, window[WINDOW:].T


class Forecaster(nn.Module):
    def __init__(self, channels=40):
        super().__init__()
        self.enter = nn.Conv1d(SENSORS, channels, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, padding=2**k, dilation=2**k) for k in range(4)
        )
        self.leave = nn.Linear(channels, SENSORS * HORIZON)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.dilated:
            x = x + torch.relu(layer(x))
        # <forward h=x>
        return self.leave(x[..., -1]).view(-1, SENSORS, HORIZON)


class Training:
    def __init__(self):
        self.rank = distributed.get_rank()
        self.net = Forecaster()
        # <model model=self.net>
        self.ddp = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-2, momentum=0.9)
        self.steps = 0

    def step(self, past, future):
        # <batch x=past>
        loss = (self.ddp(past) - future).abs().mean()
        # <loss loss=loss model=self.net again=self.net(past) x=past>
        self.optimizer.zero_grad()
        loss.backward()
        # <backward model=self.net loss=loss>
        self.optimizer.step()
        self.steps += 1
        # <step model=self.net optimizer=self.optimizer loss=loss step=self.steps rank=self.rank>


def main():
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    # <start rank=distributed.get_rank() world=distributed.get_world_size()>
    training = Training()
    for past, future in DataLoader(Windows(), batch_size=96):
        training.step(past, future)
        if training.steps >= 100_000:
            break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
