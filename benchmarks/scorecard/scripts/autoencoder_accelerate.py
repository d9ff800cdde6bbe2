"""Convolutional autoencoder of spectra, with Hugging Face accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __init__(self, n=25_600, bins=256):
        g = torch.Generator().manual_seed(9)
        centre = torch.rand(n, 1, generator=g) * bins
        self.curves = torch.exp(-((torch.arange(bins) - centre) ** 2) / 200.0).unsqueeze(1)

    def __len__(self):
        return len(self.curves)

    def __getitem__(self, i):
        curve = self.curves[i]
        # <sample x=curve i=i>
        return curve


class AutoEncoder(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(1, c, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv1d(c, 2 * c, 5, stride=2, padding=2), nn.ReLU(),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.ConvTranspose1d(2 * c, c, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose1d(c, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, x):
        code = self.encode(x)
        # <forward h=code>
        return self.decode(code)


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(4)
    # <start rank=accelerator.process_index world=accelerator.num_processes>
    module = AutoEncoder()
    # <model model=module>
    optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-3)
    loader = DataLoader(Spectra(), batch_size=256, shuffle=True)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    mse = nn.MSELoss()
    done = 0
    for _ in range(10_000):
        for curve in loader:
            # <batch x=curve>
            reconstruction = model(curve)
            loss = mse(reconstruction, curve)
            # <loss loss=loss model=module again=module(curve) x=curve>
            accelerator.backward(loss)
            # <backward model=module loss=loss>
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            # <step model=module loss=loss step=done rank=accelerator.process_index>
    accelerator.end_training()


if __name__ == "__main__":
    main()
