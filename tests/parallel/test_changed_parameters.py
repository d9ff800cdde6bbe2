"""A model or optimizer that does not fit what was distributed is named before the first step."""

import re

import pytest
import ranks

SCRIPT = """
    import sys
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)

    def plain():
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def replace(model):
        model[1] = nn.Linear(4, 3)

    def add(model):
        model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))

    def remove(model):
        model[1] = nn.Identity()

    def reshape(model):
        model[0].weight.data = torch.zeros(4, 5)

    def assign(model):
        for layer in model:
            layer.weight = nn.Parameter(torch.zeros(layer.weight.shape))

    def trained(layout, change):
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distributed, optimizer = world.distribute(model, optimizer, layout=layout)
        change(model)
        world.backward(distributed(torch.ones(2, 3)).sum())
        world.step(optimizer)

    def twice(layout):
        model = world.distribute(plain(), layout=layout)
        world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), layout=layout)

    def created_too_early(layout):
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replace(model)
        distributed, optimizer = world.distribute(model, optimizer, layout=layout)
        world.backward(distributed(torch.ones(2, 3)).sum())
        world.step(optimizer)

    def of_another_model(layout):
        optimizer = torch.optim.SGD(plain().parameters(), lr=0.1)
        model, optimizer = world.distribute(plain(), optimizer, layout=layout)
        world.backward(model(torch.ones(2, 3)).sum())
        world.step(optimizer)

    def without_shape(layout):
        model = nn.LazyLinear(2)
        world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), layout=layout)

    CASES = {
        "unchanged": lambda layout: trained(layout, lambda model: model.to("cpu").float().train()),
        "replaced": lambda layout: trained(layout, replace),
        "added": lambda layout: trained(layout, add),
        "removed": lambda layout: trained(layout, remove),
        "dtype": lambda layout: trained(layout, nn.Module.double),
        "shape": lambda layout: trained(layout, reshape),
        "assigned": lambda layout: trained(layout, assign),
        "twice": twice,
        "early": created_too_early,
        "another": of_another_model,
        "lazy": without_shape,
        "device": lambda layout: trained(layout, lambda model: model.to("meta")),
    }
    layout = sys.argv[1]
    for name, case in CASES.items():
        if name == "shape" and layout != "data":
            continue  # a DTensor does not take the data of another shape
        try:
            case(layout)
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if world.rank == 0:
            print(f"{name}: {said}", flush=True)
"""
AGAIN = "HINT: change the model first, then create the optimizer, then model, optimizer = world"
SAID = {
    "replaced": rf"1.weight had the shape \(2, 4\) at .* has \(3, 4\) now .and 1 more.. {AGAIN}",
    "added": rf"the parameter 0.scale was added after world.distribute. {AGAIN}",
    "removed": rf"the parameter 1.weight was removed after world.distribute .and 1 more.. {AGAIN}",
    "dtype": rf"0.weight had the dtype torch.float32 at .* has torch.float64 now .*{AGAIN}",
    "device": rf"the parameter 0.weight had the device cpu at .*, and has meta now.*{AGAIN}",
    "shape": rf"the parameter 0.weight had the shape \(4, 3\) at .*, and has \(4, 5\) now.*{AGAIN}",
    "assigned": rf"the parameter 0.weight was replaced after .*{AGAIN}.*without assign=True",
    "twice": "is distributed already. HINT: ",
    "early": r"holds a parameter of shape \(2, 4\) that no model .* no optimizer trains 1.weight",
    "lazy": "the parameter weight has no shape yet. HINT: run one forward before world.distribute",
}
ANOTHER = {
    "data": "no parameter of the SGD has a gradient, so it does not step. HINT: ",
    "zero": "the SGD holds none of the model's parameters. HINT: create the optimizer for ",
}


@pytest.mark.parametrize(
    "layout",
    ["data", "zero3", *(pytest.param(n, marks=pytest.mark.long) for n in ("zero1", "zero2"))],
)
def test_mistakes_are_named_before_the_first_step(tmp_path, layout):
    done = ranks.run(ranks.write(tmp_path, SCRIPT), layout)
    lines = [re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines()]
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert found.pop("unchanged") == "nothing"
    for name, text in {**SAID, "another": ANOTHER[layout[:4]]}.items():
        if layout == "data" or name != "shape":
            line = found.pop(name, "nothing")
            assert re.match(f"ValueError: .*{text}", line), (name, line)
