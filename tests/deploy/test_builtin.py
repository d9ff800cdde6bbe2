"""The builtin backend computes what eager PyTorch computes."""

import exported_models as models
import pytest
import torch
from exported_models import export, largest_error
from torch import nn
from torch.nn import functional

from paceline.deploy.export import ExportError
from paceline.deploy.native_model import NativeModel

DTYPES = {"float32": 1e-6, "float64": 1e-13}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (models.mlp, ["batch,6"]),
        (lambda: models.mlp(2, 1, 150), ["batch,2"]),
        (models.Net, ["batch,3,8,8"]),
        (models.Attention, ["batch,7,16"]),
        (models.Elementwise, ["batch,5", "batch,5"]),
        (models.Volume, ["batch,2,4,6,4"]),
    ],
    ids=["mlp", "narrow", "unet", "attention", "elementwise", "volume"],
)
def test_results_equal_eager(tmp_path, dtype, build, shapes):
    torch.manual_seed(3)
    model = build()
    path = tmp_path / "model.paceline"
    export(model, path, *(f"x{i}: {dtype}[{shape}]" for i, shape in enumerate(shapes)))
    for batch in (1, 6, 37):
        sizes = [(batch, *map(int, one.split(",")[1:])) for one in shapes]
        assert largest_error(model, path, dtype, *sizes) < DTYPES[dtype]


@pytest.mark.parametrize("seed", range(6))
def test_random_networks_equal_eager(tmp_path, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    torch.manual_seed(seed)
    channels, layers = draw(1, 2, 5), []
    shape = (channels, draw(5, 8), draw(6, 9))
    for _ in range(draw(1, 2, 3)):
        wanted = draw(1, 4, 17, 40)
        kernel = draw(1, 2, 3)
        layers.append(nn.Conv2d(channels, wanted, kernel, stride=draw(1, 2), padding=draw(1, 2)))
        layers.append(draw(nn.ReLU(), nn.Tanh(), nn.ELU(), nn.Hardtanh(), nn.BatchNorm2d(wanted)))
        channels = wanted
    layers += [nn.Flatten(), nn.LazyLinear(draw(1, 7, 70)), nn.Softplus(), nn.LazyLinear(3)]
    model = nn.Sequential(*layers)
    model(torch.zeros(2, *shape))
    text = ",".join(map(str, shape))
    for dtype, limit in DTYPES.items():
        path = tmp_path / f"{dtype}.paceline"
        export(model, path, f"x: {dtype}[batch,{text}]")
        assert largest_error(model, path, dtype, (draw(1, 2, 9, 130), *shape)) < limit


class Transposed(nn.Module):
    """Transposed convolutions of all kinds of strides, on images and on one value."""

    def __init__(self):
        super().__init__()
        kinds = [  # kernel, stride, padding, padding of the output, groups, dilation
            *((2, 2, 0, 0, 1, 1), (3, 2, 1, 1, 1, 1), (4, 2, 1, 0, 2, 1), (5, 3, 2, 2, 1, 1)),
            *(
                (1, 2, 0, 1, 1, 1),
                (2, 3, 0, 1, 1, 1),
                (3, 2, 0, 0, 1, 2),
                (3, (1, 2), (2, 1), 0, 4, 1),
            ),
            *((7, 2, 3, 1, 1, 1), (3, 1, 1, 0, 1, 1)),
        ]
        self.layers = nn.ModuleList(
            nn.ConvTranspose2d(4, 8, k, s, p, o, g, dilation=d) for k, s, p, o, g, d in kinds
        )
        self.last = nn.ConvTranspose2d(4, 8, 4, 2, 1)

    def forward(self, x):
        return (*(layer(x) for layer in self.layers), self.last(x[:, :, :1, :1]))


def test_transposed_convolutions_equal_eager(tmp_path):
    torch.manual_seed(3)
    model, path = Transposed(), tmp_path / "model.paceline"
    export(model, path, "x: float64[batch,4,3,5]")
    assert largest_error(model, path, "float64", (6, 4, 3, 5)) < 1e-13


def test_fixed_batch(tmp_path):
    path = tmp_path / "model.paceline"
    result = export(models.mlp(), path, "x: float64[4,6]")
    assert result.inputs[0]["shape"] == [4, 6]
    assert largest_error(models.mlp(), path, "float64", (4, 6)) < 1e-13
    with (
        NativeModel(path) as model,
        pytest.raises(ValueError, match=r"\[5, 6\]; the model has \[4, 6\]"),
    ):
        model.run(
            [torch.zeros(5, 6, dtype=torch.float64)], [torch.zeros(5, 3, dtype=torch.float64)]
        )


class Mixed(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Wide(nn.Module):
    def forward(self, x):
        return functional.linear(x.float(), torch.ones(2, 3)).double()


class Recurrent(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixed(), "over the batch"),
        (Wide(), "a value of float32"),
        (Recurrent(), "the operator aten.cumsum"),
    ],
    ids=["mixes samples", "lower precision", "recurrence"],
)
def test_what_it_cannot_compute_is_refused(tmp_path, model, reason):
    path = tmp_path / "model.paceline"
    with pytest.raises(ExportError, match=reason):
        export(model, path, "x: float64[batch,3]")
    assert not path.exists()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


def test_models_that_change_their_buffers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="changes its buffers"):
        export(Counting(), tmp_path / "m", "x: float32[batch,4]")


class Changed(nn.Module):
    """Changes a tensor in place, and returns the tensor and not the operator's result."""

    def __init__(self, change):
        super().__init__()
        self.change, self.layer = change, nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        self.change(x, h)
        return h


IN_PLACE = {
    "a result": lambda x, h: h.clamp_(-0.05, 0.05),
    "a result, by a layer": lambda x, h: nn.ReLU(inplace=True)(h),
    "a view of all": lambda x, h: h.view(-1, 2, 2).clamp_(-0.05, 0.05),
    "a view of a part": lambda x, h: h[:, 1:3].clamp_(-0.05, 0.05),
    "an input": lambda x, h: h.mul_(x.add_(1)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_changes_in_place_are_exported_or_refused(tmp_path, kind):
    torch.manual_seed(3)
    model, path = Changed(IN_PLACE[kind]), tmp_path / "model.paceline"
    refused = {
        "a view of a part": "the operator aten.slice_scatter",
        "an input": "changes an input in place",  # it belongs to the solver
    }
    # The examples are such that the test vectors do not show the change.
    options = {"examples": [torch.zeros(1, 4)], "tolerance": 1e-6}
    with torch.no_grad():
        model.layer.bias.fill_(0.01)
    if kind in refused:
        with pytest.raises(ValueError, match=refused[kind]):
            export(model, path, "x: float32[batch,4]", **options)
        return
    export(model, path, "x: float32[batch,4]", **options)
    assert largest_error(model, path, "float32", (9, 4)) < 1e-6


def test_layers_that_work_in_place_equal_eager(tmp_path):
    torch.manual_seed(3)
    kinds = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.SiLU, nn.Mish, nn.ReLU6, nn.Hardtanh)
    kinds += (nn.Hardswish, nn.Hardsigmoid, nn.Dropout)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), *(one(inplace=True) for one in kinds)]
    model = nn.Sequential(
        *layers[:2], *(x for one in layers[2:] for x in (one, nn.Conv2d(3, 3, 1)))
    )
    export(model, tmp_path / "m", "x: float64[batch,2,5,5]")
    assert largest_error(model, tmp_path / "m", "float64", (9, 2, 5, 5)) < 1e-13


def test_error_above_the_tolerance_is_refused(tmp_path):
    path = tmp_path / "model.paceline"
    with pytest.raises(ExportError, match="builtin: error"):
        export(models.mlp(), path, "x: float32[batch,6]", tolerance=1e-12)
    assert not path.exists()


@pytest.mark.parametrize(
    "special", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0, 1e-30]
)
def test_special_values_equal_eager(tmp_path, special):
    model = models.Elementwise()
    path = tmp_path / "model.paceline"
    export(model, path, "x: float32[batch,5]", "y: float32[batch,5]")
    x, y = torch.full((3, 5), special), torch.ones(3, 5)
    found = [torch.zeros(3, 24), torch.zeros(3, 1), torch.zeros(3, 5)]
    with NativeModel(path) as native:
        native.run([x, y], found)
    for a, b in zip(found, model(x, y), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_tensors_that_are_not_in_the_memory_of_the_host_are_refused(tmp_path):
    path = tmp_path / "model.paceline"
    export(models.mlp(), path, "x: float32[batch,6]")
    with NativeModel(path) as native, pytest.raises(ValueError, match="on meta, not on the CPU"):
        native.run([torch.zeros(2, 6, device="meta")], [torch.zeros(2, 1)])
