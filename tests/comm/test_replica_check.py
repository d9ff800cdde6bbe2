"""Errors for DDP models that differ between ranks: the parameter, and its value on each rank."""

import pytest
import ranks

from paceline.comm.replica_check import differing

DIFFERS = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if sys.argv[1] == "paceline":
        import paceline
    dist.init_process_group(sys.argv[1])
    rank = dist.get_rank()

    def model(width=8, dtype=torch.float32, layers=2, frozen=False, norm=nn.BatchNorm1d):
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), norm(width))
        net[0].weight.requires_grad = not frozen
        return net.to(dtype)

    odd = rank == 1
    cases = {
        "same": model(),
        "type": model(dtype=torch.float64 if odd else torch.float32),
        "shape": model(width=6 if odd else 8),
        "more": model(layers=3 if odd else 2, norm=nn.Identity),
        "frozen": model(frozen=odd),
        "buffer": model(norm=lambda n: nn.BatchNorm1d(n, affine=False,
                                                      track_running_stats=not odd)),
        "late": model(),
    }
    for name, net in cases.items():
        try:
            DistributedDataParallel(net)
            print(f"{name}: made", flush=True)
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
    dist.destroy_process_group()
    """
SAID = "the models for DistributedDataParallel differ between ranks: "
HINT = ". HINT: build the same model on all ranks, independent of the rank, files and data"


@pytest.mark.parametrize(
    ("backend", "options"),
    [("paceline", "--record record"), ("gloo", "--exchange paceline")],
)
def test_different_ddp_parameter_is_reported_on_each_rank(tmp_path, backend, options):
    script = ranks.write(tmp_path, DIFFERS)
    done = ranks.run(script, backend, ranks=3, launcher=f"paceline {options}")
    expected = {
        "same: made",
        f"type: {SAID}0.weight is float32 of 8 x 8 on ranks 0, 2, float64 of 8 x 8 on rank 1{HINT}",
        f"shape: {SAID}0.weight is float32 of 8 x 8 on ranks 0, 2, "
        f"float32 of 6 x 6 on rank 1{HINT}",
        f"more: {SAID}tensor 4 is missing on ranks 0, 2, "
        f"2.weight (float32 of 8 x 8) on rank 1{HINT}",
        f"frozen: {SAID}tensor 0 is 0.weight (float32 of 8 x 8) on ranks 0, 2, "
        f"0.bias (float32 of 8) on rank 1{HINT}",
        f"buffer: {SAID}tensor 4 is 2.running_mean (float32 of 8) on ranks 0, 2, "
        f"missing on rank 1{HINT}",
        "late: made",
    }
    assert expected <= ranks.untagged(done.stdout)


def test_only_ranks_of_process_group_are_reported():
    each = [[["w", "float32 of 2"]], [["w", "float32 of 3"]], [["w", "float32 of 3"]]]
    said = differing(each, [4, 6, 7])
    assert "w is float32 of 2 on rank 4, float32 of 3 on ranks 6-7." in said
