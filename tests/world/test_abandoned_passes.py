"""Passes through a sharded loader that a script does not complete, in ``world.batches``."""

import ranks

KEPT = """
    import itertools, os, signal, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init(progress=False)
    data = TensorDataset(torch.arange(40))
    loader = world.shard(DataLoader(data, 4, shuffle=True))
    validation = world.shard(DataLoader(data, 4), every_sample_once=True)
    expected = [[x.tolist() for (x,), _ in loader.iterate(epoch)] for epoch in range(4)]
    for epoch in world.epochs(4, checkpoint=sys.argv[1], every=2):
        passing = world.batches(loader)  # the iterator of the last epoch is freed only after this
        for number, (x,) in enumerate(itertools.islice(passing, 5)):
            assert x.tolist() in expected[epoch], (epoch, number)
            world._recorder.end_of_step()
            if (epoch, number) == (2, 3) and not os.path.exists(sys.argv[1] + ".killed"):
                open(sys.argv[1] + ".killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        checking = world.batches(validation)
        assert next(checking)[0].tolist() == [0, 1, 2, 3]
        with open(sys.argv[1] + ".log", "a") as log:
            print(epoch, number, file=log)

    world.epochs(1)
    first, second = world.batches(loader), world.batches(loader)
    pairs = [(next(first)[0].tolist(), next(second)[0].tolist()) for _ in range(3)]
    assert all(one != other for one, other in pairs)
"""


def test_passes_whose_iterators_are_kept_have_orders_of_their_own(tmp_path):
    script = ranks.write(tmp_path, KEPT)
    out = tmp_path / "checkpoint"
    first = ranks.run(script, out, ranks=1, launcher="python", check=False)
    assert (tmp_path / "checkpoint.killed").exists(), first.stderr
    ranks.run(script, out, ranks=1, launcher="python")
    lines = (tmp_path / "checkpoint.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]
