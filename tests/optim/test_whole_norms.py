"""Norms of tensors whose shards lie on the ranks of one axis, or of two axes, of a mesh."""

import ranks

SCRIPT = """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from paceline.optim.whole_norms import whole_norms

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(8, 12)
    both = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    half = distribute_tensor(whole.half() * 3e4, mesh["tp"], [Shard(1)])
    layer = torch.nn.Linear(12, 8, bias=False)
    norm = layer.weight.detach().double().norm()
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])  # shards along the dim that is divided already
    (weight,) = layer.parameters()
    found = whole_norms([both, weight.detach(), half])
    expected = torch.stack([whole.double().norm(), norm, (whole.half() * 3e4).double().norm()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    print("equal", type(weight.placements[0]).__name__, flush=True)
"""


def test_norm_is_that_of_the_whole_tensor_on_a_mesh_of_two_axes(tmp_path):
    out = ranks.run(ranks.write(tmp_path, SCRIPT), ranks=4).stdout
    assert ranks.untagged(out) == {"equal _StridedShard"}
