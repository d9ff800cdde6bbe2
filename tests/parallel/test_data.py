"""DDP's buckets are final from the start and are sent in the order of the backward pass."""

from types import SimpleNamespace

import pytest
import ranks
from torch import nn

from paceline.parallel.replicated import data_parallel as data

ORDER = """
    import sys
    import torch, torch.distributed as dist
    import paceline

    world = paceline.init(progress=False)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(5)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"find_unused_parameters": True} if "unused" in sys.argv else {}
    model, optimizer = world.distribute(net, optimizer, bucket_cap_mb=0.001, **options)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    gone = []

    def hook(state, bucket):
        gone.append(sorted({names[id(one)][0] for one in bucket.parameters()}))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        print(world.rank, "gone", *("".join(one) for one in gone), flush=True)
        gone.clear()
    """


@pytest.mark.parametrize("word", ["used", "unused"])
def test_ddp_buckets_are_sent_in_backward_order_from_first_step(tmp_path, word):
    done = ranks.run(ranks.write(tmp_path, ORDER), word)
    found = {line.partition("gone ")[2] for line in done.stdout.splitlines() if "gone" in line}
    assert len(found) == 1, found  # the same in every step and on all ranks
    last = [max(bucket) for bucket in found.pop().split()]
    assert sorted(set(last)) == list("01234")
    assert last == sorted(last, reverse=True)


def test_advice_about_unused_parameters_counts_without_the_ignored_ones(monkeypatch):
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abc"})
    replica = SimpleNamespace(
        module=module, find_unused_parameters=False, parameters_to_ignore={"a.weight"}
    )
    monkeypatch.setattr(data, "replicas", {replica.module: replica}.values())
    # DDP counts from the last parameter, as _build_params_for_reducer orders them
    error = RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "Parameter indices which did not receive grad for rank 0: 1"
    )
    assert "(b.weight)" in data.explain_ddp_error(error)
