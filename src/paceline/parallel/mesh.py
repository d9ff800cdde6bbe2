"""The ranks of a job along named axes: who trains the same samples, and who holds which part.

| axis | ranks along it |
| --- | --- |
| ``stage`` | hold the stages of a pipeline |
| ``data`` | train different samples |
| ``depth``, ``height``, ``width`` | hold parts of the same samples |
| ``tensor`` | hold parts of the same operators |

The first axis is the outermost one: ranks along the last one follow each other on a node, as they
exchange most. Ranks that differ in ``data`` only hold copies (or shards) of the same model part;
ranks of the same data rank train the same samples, and are its *model group*.
"""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.sharded_tensor import copies_in_mesh, is_sharded
from ..comm.group_device import exchangeable
from ..cost.layout import AXIS_WORDS, FREQUENT_AXES, Layout, crossing_line
from ..plurals import Places, named_ranks

DATA = "data"
STAGE = "stage"
TENSOR = "tensor"
AXES = tuple(AXIS_WORDS.values())
MODEL_AXES = tuple(axis for axis in AXES if axis != DATA)
WHOLE_MODEL_AXES = tuple(axis for axis in AXES if axis not in (STAGE, TENSOR))
FIRST_USE_S = 120.0  # for the connections of a new group


class Mesh:
    """The ranks of a world along named axes, and this rank's place in it.

    It begins with the axis "data" of all ranks; ``arrange`` gives it the axes of a layout.

    Attributes:
        rank: Global rank.
        size: Number of ranks of the job.
        shape: Extent of each axis, outermost first; axes of one rank are left out, except "data".
        is_arranged: Whether a layout has arranged it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.shape = {DATA: size}
        self.is_arranged = False
        self._ranks: list[int] = list(range(size))  # by place, the last axis first
        self._numbers: dict[int, int] = {}  # of ranks in that list
        self._groups: dict[frozenset[str], Any] = {}
        self._device_meshes: dict[str, DeviceMesh] = {}

    # places

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis."""
        number, place = self._numbers.get(rank, rank), {}
        for axis, extent in reversed(self.shape.items()):
            number, place[axis] = divmod(number, extent)
        return {axis: place[axis] for axis in self.shape}

    @property
    def place(self) -> dict[str, int]:
        """The position of this rank along each axis."""
        return self.place_of(self.rank)

    @property
    def data_rank(self) -> int:
        """Which of the data ranks this is: ranks with the same number train the same samples."""
        return self.place[DATA]

    @property
    def data_size(self) -> int:
        """Number of data ranks."""
        return self.shape[DATA]

    @property
    def model_size(self) -> int:
        """Number of ranks that train the same samples."""
        return self.size // self.data_size

    @property
    def is_divided(self) -> bool:
        """Whether ranks share samples: an axis besides "data" has several ranks."""
        return len(self.shape) > 1

    def ranks_along(self, axes: Collection[str], rank: int | None = None) -> list[int]:
        """Return the ranks that differ from this one along these axes only, and itself."""
        place = self.place_of(self.rank if rank is None else rank)
        positions = [range(n) if axis in axes else [place[axis]] for axis, n in self.shape.items()]
        return [self._ranks[self._number(position)] for position in product(*positions)]

    def copies_of(self, tensor: Any, parted: Collection[str] = ()) -> list[int]:
        """Return the ranks that hold copies of a tensor, of a DTensor those of this rank's part.

        Args:
            parted: Axes along which ranks hold other tensors.
        """
        axes = [axis for axis in self.shape if axis not in parted]
        if not is_sharded(tensor):
            return self.ranks_along(axes)
        if not self.is_divided:
            return copies_in_mesh(tensor)
        copies, members = copies_in_mesh(tensor), set(tensor.device_mesh.mesh.flatten().tolist())
        for count in range(len(self.shape) + 1):
            for own in combinations(self.shape, count):
                if set(self.ranks_along(own)) == members:
                    others = [axis for axis in axes if axis not in own]
                    return sorted(r for copy in copies for r in self.ranks_along(others, copy))
        return copies  # a mesh of the script

    @property
    def sharing_samples(self) -> list[int]:
        """The ranks of this data rank: they train the same samples."""
        return sorted(self.ranks_along(MODEL_AXES))

    @property
    def first_of_data_ranks(self) -> list[int]:
        """One rank of each data rank, by data rank."""
        zero = self._ranks[0]
        return self.ranks_along((DATA,), zero)

    def _number(self, position: Sequence[int]) -> int:
        number = 0
        for at, extent in zip(position, self.shape.values(), strict=True):
            number = number * extent + at
        return number

    def name(self, rank: int | None = None) -> str:
        """Return a rank with its place, for messages: "rank 5 (data 1, stage 0)"."""
        return self.named([self.rank if rank is None else rank])

    def named(self, ranks: Collection[int]) -> str:
        """Return ranks with the place that they share: "ranks 4-7 (stage 1)"."""
        places = {rank: self.place_of(rank) for rank in ranks} if self.is_divided else None
        return named_ranks(ranks, places=places)

    @property
    def places(self) -> Places:
        """The places of all ranks; empty where "data" is the only axis."""
        return {rank: self.place_of(rank) for rank in range(self.size) if self.is_divided}

    # groups

    def group(self, *axes: str) -> Any:
        """Return the process group of the ranks that differ along these axes only.

        Collective over all ranks where the group does not exist yet. None without a process group.
        """
        if not dist.is_initialized():
            return None
        wanted = frozenset(axis for axis in axes if axis in self.shape)
        if wanted == self.shape.keys():
            return dist.group.WORLD
        if wanted not in self._groups:
            others = [axis for axis in self.shape if axis not in wanted]
            starts = {min(self.ranks_along(wanted, rank)): rank for rank in range(self.size)}
            assert len(starts) == prod(self.shape[axis] for axis in others)
            for first in sorted(starts):
                ranks = self.ranks_along(wanted, first)
                made = dist.new_group(ranks)
                if self.rank in ranks:
                    self._groups[wanted] = made
        return self._groups[wanted]

    def create_groups(self) -> None:
        """Create the groups of all axes, as groups can't be created in a backward. Collective."""
        for axis in self.shape:
            self.group(axis)
        self.group(*MODEL_AXES)

    def try_groups(self, seconds: float = FIRST_USE_S) -> None:
        """Use the group of each axis once, so that a network that blocks one is seen at once.

        Collective.

        Raises:
            ValueError: The ranks of an axis have not exchanged within this time.
        """
        for axis, extent in self.shape.items():
            if extent == 1:
                continue
            group, ranks = self.group(axis), sorted(self.ranks_along((axis,)))
            errors = _first_use(group, seconds)
            if errors is None or errors:
                reason = f": {errors[0]}" if errors else f" within {seconds:.0f} s"
                raise ValueError(
                    f"{self.name()}: the ranks of the axis {axis} ({named_ranks(ranks)}) could not "
                    f"exchange a number{reason}. HINT: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME "
                    "names the network interface; paceline check measures the network"
                )

    @property
    def data_group(self) -> Any:
        """The ranks that train other samples with copies of this rank's part of the model."""
        return self.group(DATA) if self.is_divided else dist.group.WORLD

    @property
    def divides_model(self) -> bool:
        """Whether ranks compute with parts of the model, and not only of samples."""
        return not self.shape.keys() <= set(WHOLE_MODEL_AXES)

    @property
    def copies_group(self) -> Any:
        """The ranks that hold copies, or shards, of this rank's part of the model.

        Their gradients are averaged. Parts of samples need whole models, so these ranks are in it.
        """
        return self.group(*WHOLE_MODEL_AXES) if self.is_divided else dist.group.WORLD

    @property
    def model_group(self) -> Any:
        """The ranks that train this rank's samples."""
        return self.group(*MODEL_AXES)

    def device_mesh(self, device: str) -> DeviceMesh:
        """Return the mesh for PyTorch, with the same axes. Collective where it is new."""
        if device not in self._device_meshes:
            ranks = torch.tensor(self._ranks).view(*self.shape.values())
            made = DeviceMesh(device, ranks, mesh_dim_names=tuple(self.shape))
            self._device_meshes[device] = made
        return self._device_meshes[device]

    # a layout

    def arrange(self, layout: Layout, nodes: Sequence[str]) -> list[str]:
        """Give the mesh the axes of a layout; return lines about groups on several nodes.

        Args:
            layout: It has all extents, or leaves those of the data ranks open.
            nodes: Of each rank, its node; ranks of a node need not follow each other.

        Raises:
            ValueError: The number of ranks does not fit, or another layout has arranged the mesh.
        """
        extents = layout.over(self.size).extents
        shape = {
            AXIS_WORDS[name]: extent or 1
            for name, extent in extents.items()
            if extent != 1 or AXIS_WORDS[name] == DATA
        }
        if shape == self.shape:
            self.is_arranged = True
            return []
        if self.is_arranged:
            raise ValueError(
                f"layout={str(layout)!r} divides the ranks in another way than the model before: "
                f"{_describe(shape)} instead of {_describe(self.shape)}. HINT: the same dp, tp, "
                "pp, h, w and d for all models"
            )
        self.is_arranged, self.shape = True, shape
        order = {node: number for number, node in reversed([*enumerate(nodes)])}
        self._ranks = sorted(range(self.size), key=lambda rank: (order[nodes[rank]], rank))
        self._numbers = {rank: number for number, rank in enumerate(self._ranks)}
        return [line for axis in FREQUENT_AXES if (line := self._crossing(axis, nodes))]

    def _crossing(self, axis: str, nodes: Sequence[str]) -> str:
        """Return a line about ranks of an axis on several nodes; "" if there are none."""
        if axis not in self.shape:
            return ""
        groups = [self.ranks_along((axis,), rank) for rank in range(self.size)]
        return crossing_line(axis, groups, nodes)

    def header(self) -> dict[str, Any]:
        """Return the header field ``mesh`` of this rank's record."""
        groups: dict[str, str] = {}
        for axes, group in self._named_groups() if self.is_divided else ():
            where = ", ".join(f"{a} {at}" for a, at in self.place.items() if a not in axes)
            along = " x ".join(axis for axis in self.shape if axis in axes)
            groups[str(group.group_name)] = f"{along} ({where})" if where else along
        return {"axes": list(self.shape.items()), "place": list(self.place.values())} | (
            {"groups": groups} if groups else {}
        )

    def _named_groups(self) -> Iterable[tuple[Collection[str], Any]]:
        yield from self._groups.items()
        for mesh in self._device_meshes.values():
            yield from (((axis,), mesh.get_group(axis)) for axis in self.shape)


def _first_use(group: Any, seconds: float) -> list[BaseException] | None:
    """Exchange a number; return the error in a list, [] for none, None where it takes too long."""
    errors: list[BaseException] = []

    def exchange() -> None:
        try:
            number = exchangeable(torch.ones(1), group)
            dist.all_reduce(number, group=group)
            number.item()  # waits for a GPU
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=exchange, name="first use of a group", daemon=True)
    thread.start()
    thread.join(seconds)
    return None if thread.is_alive() else errors


def _describe(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {extent}" for axis, extent in shape.items())
