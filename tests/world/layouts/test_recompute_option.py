"""``world.distribute`` with recomputation, and models of ``world.deferred``, on ranks."""

import pytest
import ranks

SCRIPT = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)

    def train(deferred, **options):
        torch.manual_seed(1)
        make = lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False
        )
        if deferred:
            with world.deferred():
                model = make()
        else:
            model = make()
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = world.distribute(model, optimizer, **options)
        torch.manual_seed(10 + world.rank)
        for _ in range(3):
            world.backward(model(torch.randn(4, 8, 16)).square().mean())
            world.step(optimizer)
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        return [p.detach().clone() for p in whole]

    plain = train(False)
    for options in (
        {"recompute": "blocks"}, {"recompute": "selective"},
        {"recompute": "auto", "memory_budget": 0.0002},
    ):
        found = train(True, **options)
        same = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        print("same", options["recompute"], same, flush=True)
    for layout in ("zero2", "zero3"):
        plain = train(False, layout=layout)
        for way in ("blocks", "selective"):
            found = train(True, layout=layout, recompute=way)
            same = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
            print("same", layout, way, same, flush=True)
    """


@pytest.mark.long
def test_recomputation_and_deferred_model_train_as_plain_model_on_two_ranks(tmp_path):
    done = ranks.run(ranks.write(tmp_path, SCRIPT))
    found = {line for line in ranks.untagged(done.stdout) if line.startswith("same")}
    data = {f"same {way} True" for way in ("blocks", "selective", "auto")}
    sharded = {
        f"same {one} {way} True" for one in ("zero2", "zero3") for way in ("blocks", "selective")
    }
    assert found == data | sharded


SHARDED = """
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    import paceline
    from paceline.parallel.materialization import Materialization
    from paceline.parallel.recompute.recomputation import recompute_blocks

    world = paceline.init(progress=False)

    def made():
        torch.manual_seed(1)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(3))
        return nn.Sequential(*layers)

    expected = made()
    with world.deferred():
        model = made()
    plan = Materialization(model)
    recompute_blocks(model, "blocks", None, None, print)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters())

    def keep(name, tensor):
        sharded = parameters[name]
        parts = torch.chunk(tensor, world.size)
        part = parts[world.rank] if world.rank < len(parts) else tensor[:0]
        sharded.to_local().detach().copy_(part)

    plan.run(keep)
    assert plan.peak_bytes <= max(p.nbytes for p in expected.parameters())
    x = torch.randn(5, 4, 16)
    for one in (expected, model):
        one(x).square().mean().backward()
    close = all(
        torch.allclose(p.grad, parameters[name].grad.full_tensor(), atol=1e-6)
        for name, p in expected.named_parameters()
    )
    same = all(
        torch.equal(p, parameters[name].full_tensor()) for name, p in expected.named_parameters()
    )
    print("same", same, "gradients", close, flush=True)
    """


def test_deferred_model_is_computed_into_shards_of_fsdp_with_recomputation(tmp_path):
    done = ranks.run(ranks.write(tmp_path, SHARDED))
    assert "same True gradients True" in ranks.untagged(done.stdout)
