"""Training scripts that the tests start on ranks."""

TRAIN = """
    import argparse, os, signal, sys, time
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--samples", type=int, default=203)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--checkpoint")
    p.add_argument("--every", default="epoch")
    p.add_argument("--clip", type=float)
    p.add_argument("--optimizer", default="Adam")
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--batch-norm", action="store_true")
    p.add_argument("--precision", default="fp32")
    p.add_argument("--die-at", type=int)
    p.add_argument("--sleep", type=float, default=0.0)
    a = p.parse_args()

    g = torch.Generator().manual_seed(1)
    x = torch.randn(a.samples, 10, generator=g)
    y = (x[:, :2].sum(1) > 0).long()
    world = paceline.init(seed=5, precision=a.precision, progress=False)
    norm = [nn.BatchNorm1d(32)] if a.batch_norm else []
    model = nn.Sequential(nn.Linear(10, 32), *norm, nn.Tanh(), nn.Dropout(a.dropout),
                          nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = getattr(torch.optim, a.optimizer)(model.parameters(), lr=0.01)
    world.scale_learning_rate(optimizer, global_batch=2 * a.batch, reference_batch=a.batch,
                              warmup=9)
    model, optimizer = world.distribute(model, optimizer, accumulate=a.accumulate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    world.keep(scheduler=scheduler)
    loader = world.shard(DataLoader(TensorDataset(x, y), batch_size=1, shuffle=True),
                         global_batch=a.batch)
    validation = world.shard(DataLoader(TensorDataset(x[:53], y[:53]), batch_size=3),
                             every_sample_once=True)
    figures = []
    for epoch in world.epochs(a.epochs, checkpoint=a.checkpoint, every=a.every):
        torch.rand(3)  # what comes before the loop must not matter to a resumed run
        training = world.meter()
        for images, labels in world.batches(loader):
            loss = F.cross_entropy(model(images), labels)
            world.backward(loss)
            stepped = world.step(optimizer, clip=a.clip)
            training.add(loss=loss * len(labels), count=len(labels))
            time.sleep(a.sleep)
            if world._recorder.step == 10:  # long enough for launchers to know these ranks
                open(f"{a.out}.under-way", "w").close()
            if stepped and a.die_at == world._recorder.step and world.rank == world.size - 1:
                if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
        scheduler.step()
        score = world.meter()
        for images, labels in world.batches(validation):
            assert not torch.is_grad_enabled()
            assert not model.training
            score.add(correct=(model(images).argmax(1) == labels).sum(), count=len(labels))
        assert torch.is_grad_enabled()
        figures.append((training.ratio("loss", "count"), *training.sum("count"),
                        *score.sum("correct", "count")))
    plain = model.module if hasattr(model, "module") else model
    if world.rank == 0:
        torch.save({"model": plain.state_dict(), "figures": figures,
                    "rate": optimizer.param_groups[0]["lr"]}, a.out)
"""
