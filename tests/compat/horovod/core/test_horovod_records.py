"""What the record says of Horovod's operations: who waits for whom, in the training thread."""

import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run

LATE_S, STEPS = 0.1, 12
TRAIN = f"""
    import time
    import torch
    import paceline.compat.horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(3)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handles, step = [], 0
    for name, one in net.named_parameters():
        def submit(p, name=name):
            if step % 2:  # by the background thread, which may overlap the backward
                handles.append(hvd.allreduce_async_(p.grad, name=name))
        one.register_post_accumulate_grad_hook(submit)
    for step in range({STEPS}):
        if hvd.rank() == 1:
            time.sleep({LATE_S})
        net(torch.randn(8, 60)).square().mean().backward()
        for handle in handles:
            hvd.synchronize(handle)
        handles.clear()
        if not step % 2:
            for name, one in net.named_parameters():
                hvd.allreduce_(one.grad, name=name)
        optimizer.step()
        optimizer.zero_grad()
    hvd.barrier()
    """


def test_waits_for_a_late_rank_are_recorded(tmp_path):
    ranks.run(ranks.write(tmp_path, TRAIN), launcher="paceline --record record")
    report = analyse(load_run(tmp_path / "record"))
    assert report.confidence == 1
    assert report.unmatched == 0
    (group,) = report.groups
    assert {one.name for one in group.collectives} <= {"all-reduce", "barrier"}
    waits = [states["wait"] * report.window_s for states in report.states]
    assert waits[0] > 0.5 * LATE_S * (STEPS - 1)
    assert waits[1] < 0.5 * waits[0]
    assert max(report.background) == 0  # collectives are those of the training


ENDS_LATE = """
    import time
    import torch
    import paceline.compat.horovod.torch as hvd

    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    for step in range(4):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if hvd.rank() == 0:
        time.sleep(0.5)  # it tests, for instance
    """


def test_ranks_that_end_first_wait_for_the_last(tmp_path):
    ranks.run(ranks.write(tmp_path, ENDS_LATE), launcher="paceline --record record")
    report = analyse(load_run(tmp_path / "record"))
    assert report.unmatched == 0
    first, last = (states["wait"] * report.window_s for states in report.states)
    assert first < 0.2
    assert last > 0.4
