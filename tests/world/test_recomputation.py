"""``world.distribute`` with recomputation, and models of ``world.deferred``, on ranks."""

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
        return [p.detach().clone() for p in model.parameters()]

    plain = train(False)
    for options in (
        {"recompute": "blocks"}, {"recompute": "selective"},
        {"recompute": "auto", "memory_budget": 0.0002},
    ):
        found = train(True, **options)
        same = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        print("same", options["recompute"], same, flush=True)
    """


def test_recomputation_and_deferred_model_train_as_plain_model_on_two_ranks(tmp_path):
    done = ranks.run(ranks.write(tmp_path, SCRIPT))
    found = {line for line in ranks.untagged(done.stdout) if line.startswith("same")}
    assert found == {f"same {way} True" for way in ("blocks", "selective", "auto")}
