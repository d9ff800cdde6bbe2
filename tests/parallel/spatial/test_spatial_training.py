"""A training on parts of samples equals that of one process, and continues in another layout."""

import shutil

import pytest
import ranks
import torch

SCRIPT = """
    import sys
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    class Block(nn.Sequential):
        def __init__(self, a, b):
            super().__init__(
                nn.Conv2d(a, b, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(b),
                nn.ReLU(inplace=True), nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(2, b),
                nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Block(1, 4), Block(4, 8), Block(8, 8)
            self.pool, self.up2 = nn.MaxPool2d(3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
            self.up1, self.drop = nn.Upsample(scale_factor=2, mode="bilinear"), nn.Dropout2d(0.2)
            self.d, self.e, self.head = Block(16, 8), Block(12, 4), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            a = self.a(x)
            b = self.b(self.pool(a))
            d = self.d(torch.cat([self.up2(self.c(self.pool(b))), b], 1))
            return self.head(self.drop(self.e(torch.cat([self.up1(d), a], 1))))

    layout, epochs, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    world = paceline.init(seed=3, progress=False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = world.distribute(model, optimizer, layout=layout, accumulate=2)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(12, 1, 12, 20, generator=generator)
    y = torch.randint(0, 3, (12, 12, 20), generator=generator)
    y[0, 3] = -100
    data = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
    loader = world.shard(data, global_batch=4)
    weight, lines = torch.tensor([1.0, 2.0, 0.5]), []
    torch.manual_seed(9)  # for the dropout of whole channels
    for epoch in world.epochs(epochs, checkpoint="checkpoints"):
        meter = world.meter()
        for a, b in world.batches(loader):
            found = model(a)
            loss = F.cross_entropy(found, b, weight=weight)
            world.backward(loss)
            world.step(optimizer, clip=1.0)
            right = (found.argmax(1) == b).sum()
            meter.add(loss=loss * len(a), right=right, count=len(a))
        model.eval()
        with torch.no_grad():
            checked = F.mse_loss(model(x[:2]), torch.zeros(2, 3, 12, 20)).item()
        model.train()
        lines.append([*meter.sum("loss", "right", "count"), checked])
    if world.rank == 0:
        np.zeros((3, 12, 20)).tofile(f"{out}.map")
    world.any(False)  # the file is there
    result = np.memmap(f"{out}.map", np.float64, "r+", 0, (3, 12, 20))
    world.predict(model, x[0].numpy(), result)
    part = world.part(x[:1])
    assert torch.equal(world.whole(part), x[:1])
    if world.rank == 0:
        torch.save([lines, torch.from_numpy(np.array(result)), model.state_dict()], out)
    """


def trained(script, tmp_path, name, *legs):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(script, folder)
    for layout, epochs, count in legs:
        launcher = "paceline" if count > 1 else "python"
        ranks.run(folder / script.name, layout, epochs, "out.pt", ranks=count, launcher=launcher)
    return torch.load(folder / "out.pt")


def check_equal(found, expected):
    lines, result, weights = expected
    for mine, theirs in zip(found[0], lines[-len(found[0]) :], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    torch.testing.assert_close(found[1], result, rtol=1e-9, atol=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-9, atol=1e-10)


def test_a_unet_on_parts_of_images_equals_one_process_and_continues_on_other_parts(tmp_path):
    script = ranks.write(tmp_path, SCRIPT)
    expected = trained(script, tmp_path, "alone", ("data", 2, 1))
    found = trained(script, tmp_path, "parts", ("zero3 x h2", 1, 2), ("w2", 2, 2))
    check_equal(found, expected)


@pytest.mark.long
def test_a_unet_on_four_parts_continues_on_one_rank(tmp_path):
    script = ranks.write(tmp_path, SCRIPT)
    expected = trained(script, tmp_path, "alone", ("data", 2, 1))
    check_equal(trained(script, tmp_path, "four", ("h2 x w2", 2, 4)), expected)
    check_equal(trained(script, tmp_path, "moved", ("h2 x w2", 1, 4), ("data", 2, 1)), expected)


LOADED = """
    import copy, sys
    import h5py
    import torch
    import torch.nn.functional as F
    import zarr
    import paceline
    from paceline.data import Loader
    from paceline.data.sources.formats.hdf5 import HDF5Rows

    world = paceline.init(progress=False)
    with h5py.File("volumes.h5") as file:
        known = torch.from_numpy(file["x"][:])
        targets = torch.from_numpy(file["y"][:])
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4),
                                torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 3, padding=1))
    model = world.distribute(copy.deepcopy(plain), layout="h2")
    data = Loader(("volumes.h5:x", "y"), 2, shuffle=True)
    loader = world.shard(data, global_batch=2)

    def read(*_):
        raise AssertionError("a sample is read whole")

    whole_rows, HDF5Rows.read = HDF5Rows.read, read
    seen = []
    weight = torch.tensor([1.0, 3.0, 0.5])
    for x, y in world.batches(loader):
        assert x.shape == (2, 2, 5, 7) and y.shape == (2, 5, 7), (x.shape, y.shape)
        assert x.local.size(2) == y.local.size(1) == 2 + world.rank
        loss = F.cross_entropy(model(x), y, weight=weight, ignore_index=2)
        world.backward(loss)
        whole = world.whole(x)
        at = [next(i for i, one in enumerate(known) if torch.equal(one, row)) for row in whole]
        expected = F.cross_entropy(plain(known[at]), targets[at], weight=weight, ignore_index=2)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
            mine.grad = theirs.grad = None
        seen += at
    assert sorted(seen) == list(range(6)), seen
    HDF5Rows.read = whole_rows
    shown = world.shard(Loader(("volumes.h5:x", "y"), transform=lambda a: a * 2), global_batch=1)
    x, _ = next(iter(shown))
    assert type(x) is torch.Tensor and x.shape == (1, 2, 5, 7)  # a transform sees whole samples
    if world.rank == 0:  # parts share chunks
        zarr.create_array("out.zarr", shape=(3, 5, 7), chunks=(3, 4, 7), dtype="f4")
    world.any(False)
    out = zarr.open_array("out.zarr", mode="r+")
    world.predict(model, known[0].numpy(), out)
    expected = plain.eval()(known[:1])[0].detach()
    torch.testing.assert_close(torch.from_numpy(out[:]), expected, rtol=1e-4, atol=1e-5)
    if world.rank == 0:
        open(sys.argv[1], "w").write("right")
    """


def test_a_loader_reads_parts_of_volumes_and_losses_are_those_of_whole_ones(tmp_path):
    h5py, np = pytest.importorskip("h5py"), pytest.importorskip("numpy")
    draw = np.random.default_rng(0)
    with h5py.File(tmp_path / "volumes.h5", "w") as file:
        file["x"] = draw.normal(size=(6, 2, 5, 7)).astype(np.float32)
        file["y"] = draw.integers(0, 3, (6, 5, 7))
    ranks.run(ranks.write(tmp_path, LOADED), "out.txt", ranks=2)
    assert (tmp_path / "out.txt").read_text() == "right"
