"""A training script on one device with a planted fault, and where the fault is."""

SCRIPT = """
    import sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    FAULT, STEPS = sys.argv[1], int(sys.argv[2])
    device = torch.device(DEVICE)
    GPU = device.type == "cuda"
    WIDTH, BATCH = (2048, 1024) if GPU else (128, 64)
    FEATURES = 8192 if GPU and FAULT == "copy" else 64

    class Samples(Dataset):
        def __len__(self):
            return 1_000_000
        def __getitem__(self, i):
            return torch.full((FEATURES,), float(i % 7))

    class Batches(Dataset):
        # each item is a batch, as of a reader of files
        def __init__(self):
            self.batch = torch.randn(BATCH, FEATURES)
        def __len__(self):
            return 1_000_000
        def __getitem__(self, i):
            if FAULT == "input":
                time.sleep(0.02)  # the fault "input"
            return self.batch

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(FEATURES, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.leave = nn.Linear(WIDTH, 8)
            self.table = (torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5).double()
        def forward(self, x):
            x = self.enter(x).relu()
            for layer in self.layers:
                x = x + layer(x).relu()
            if FAULT == "kernel":
                x = self.slow(x)
            return self.leave(x)
        def slow(self, x):
            wide = x.double()
            for _ in range(20):
                wide = wide @ self.table  # the fault "kernel"
            return x + 1e-9 * wide.float()

    def prepare():
        end = time.perf_counter() + (0.008 if FAULT == "sync" else 0.0)
        while time.perf_counter() < end:
            pass

    def main():
        torch.manual_seed(0)
        model = Net().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = DataLoader(Batches(), batch_size=None)
        seen = 0.0
        for step, x in enumerate(loader):
            if step == STEPS:
                break
            x = x.to(device)  # the fault "copy"
            prepare()
            for _ in range(3 if FAULT == "sync" else 1):
                loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if FAULT == "sync":
                seen += loss.item()  # the fault "sync"
        if GPU:
            torch.cuda.synchronize()
        print("trained", step, flush=True)

    main()
"""
FAULTS = ("none", "input", "sync", "kernel", "copy")


def line_of(text, fault):
    """Return the number of the line with a fault in a script."""
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if f'the fault "{fault}"' in line]
    return number
