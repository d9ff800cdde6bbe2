"""The mesh of ranks over which a model is sharded."""

from collections import Counter
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...comm.members.exchange_objects import all_gather_objects
from ...comm.shared.memory import sharing_domain
from ...cost.layout import Layout
from ..mesh import DATA, Mesh

# By the ranks of a world: one for all its models, with its groups
_meshes: WeakKeyDictionary[Mesh, dict[tuple[str, int | str | None], DeviceMesh]]
_meshes = WeakKeyDictionary()


def data_mesh(device: torch.device, layout: Layout, mesh: Mesh) -> DeviceMesh:
    """Return a mesh of the data ranks, or of replicas and the ranks that share one. Collective.

    Ranks that share samples have whole models, and are in it.

    Raises:
        ValueError: Each node is to hold a replica, and nodes have different numbers of ranks.
    """
    if mesh.divides_model:
        return mesh.device_mesh(device.type)[DATA]
    known, key = _meshes.setdefault(mesh, {}), (device.type, layout.shards)
    if key not in known:
        known[key] = _new_mesh(device, layout.shards)
    return known[key]


def _new_mesh(device: torch.device, shards: int | str | None) -> DeviceMesh:
    size = dist.get_world_size()
    if shards is None:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    if isinstance(shards, int):
        whole = torch.arange(size).view(-1, shards)
        return DeviceMesh(device.type, whole, mesh_dim_names=("replicate", "shard"))
    hosts = all_gather_objects(sharing_domain(), str)
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        shown = ", ".join(map(str, counts.values()))
        raise ValueError(
            f"world.distribute: shard_over='host' needs the same number of ranks on each host; "
            f"these have {shown}. HINT: shard_over='job'"
        )
    if len(counts) == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    ranks = [[rank for rank in range(size) if hosts[rank] == host] for host in counts]
    return DeviceMesh(device.type, ranks, mesh_dim_names=("replicate", "shard"))
