"""Which parts of the shared state are equal on all ranks, and who writes which tensor."""

import collections

import pytest
import torch
from stores import KeyStore

from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
from paceline.checkpoint.shared_state import Difference, SharedState, differences

LARGE = torch.randperm(100_003)
TENSORS = {
    "small": torch.arange(10),
    "large": LARGE,
    "bytes": LARGE.to(torch.uint8),
    "bool": LARGE > 50_000,
    "complex": torch.randn(20_001, dtype=torch.complex64),
    "half": torch.randn(70_001).to(torch.bfloat16),
    "float8": torch.randn(70_001).to(torch.float8_e4m3fn),
    "nan": torch.tensor([float("nan"), -0.0]),
    "scalar": torch.tensor(3.0),
    "columns": torch.randn(300, 301).t(),
    "sparse": torch.eye(5).to_sparse(),
    "csr": torch.eye(5).to_sparse_csr(),
    "csc": torch.eye(5).to_sparse_csc(),
    "conj": torch.randn(5, dtype=torch.complex64).conj(),
    "quantized": torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8),
    "channels": torch.quantize_per_channel(
        torch.randn(2, 9), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "empty": torch.empty(0, 3),
}


def differing(*trees):
    return differences([SharedState({"kept": {"x": tree}}).digests() for tree in trees])


def test_equal_states_have_no_differences():
    for name, tensor in TENSORS.items():
        assert differing({"t": tensor}, {"t": tensor.clone()}) == {}, name
    view = torch.cat([torch.zeros(1, dtype=torch.long), LARGE])[1:]
    other_memory = TENSORS["columns"].contiguous()
    assert differing({"t": LARGE}, {"t": view}) == {}
    assert differing({"t": TENSORS["columns"]}, {"t": other_memory}) == {}
    plain = {"a": 1, "b": {"x", "y", "z"}, "c": [1.5, None, "text", (b"x", True)]}
    turned = dict(reversed(plain.items())) | {"b": {"z", "y", "x"}}
    assert differing(plain, turned, collections.OrderedDict(plain)) == {}


def changed(tensor):
    """Return a tensor that differs in one bit, or in its values if its bits can't be changed."""
    if tensor.layout is not torch.strided:
        return (tensor.to_dense() * 2).to_sparse(layout=tensor.layout)
    if tensor.is_quantized or tensor.numel() < 2:
        return tensor.dequantize() + 1
    new = tensor.clone(memory_format=torch.contiguous_format)
    bits = new.view(torch.uint8).flatten()
    bits[0] = ~bits[0]
    return bits.view(tensor.dtype).view(tensor.shape) if tensor.dtype != torch.bool else ~tensor


def test_tensors_that_differ_are_found():
    for name, tensor in TENSORS.items():
        if name != "empty":
            assert differing({"t": tensor}, {"t": changed(tensor)}), name
    for other in (torch.empty(0, 4), torch.empty(3, 0)):
        assert differing({"t": TENSORS["empty"]}, {"t": other})


def test_order_of_elements_matters():
    for shift in (1, 4096, 50_000):
        assert differing({"t": LARGE}, {"t": LARGE.roll(shift)}), shift
    swapped = LARGE.clone()
    swapped[[5, 4101]] = swapped[[4101, 5]]
    assert differing({"t": LARGE}, {"t": swapped})
    assert differing({"t": LARGE}, {"t": LARGE.view(1, -1)})


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), ("1", 1), ([1], (1,)), (0.0, -0.0), (None, "None"), ([[], 1], [[1]])],
    ids=str,
)
def test_values_that_differ_are_found(one, other):
    assert differing(one, other) == {("kept", "x"): Difference([1], False)}


def test_differences_name_ranks_and_absent_parts():
    trees = [{"m": [1, 2], "k": {"a": 1}}, {"m": [1, 3], "k": {}}, {"m": [1, 2], "k": {"a": 1}}]
    assert differences([SharedState(tree).digests() for tree in trees]) == {
        ("m", 1): Difference([1], False),
        ("k", "a"): Difference([1], True),
    }


def test_parts_of_rank_0_are_written_whole_by_rank_0(tmp_path):
    """Other tensors, or another number of them, on other ranks change nothing."""
    store = KeyStore()
    savers = [CheckpointSaver(tmp_path, rank, 3, store, pytest.fail, 5.0) for rank in range(3)]
    for rank, one in enumerate(savers):
        buffer = torch.full((50,), float(rank))
        tree = {
            "a": {"mine": {i: torch.full((9,), float(rank)) for i in range(rank + 2)}},
            "b": {"declared": [torch.full((7,), float(rank))] * (3 - rank)},
            "c": dict(sorted({"x": torch.ones(8), "y": torch.zeros(8)}.items(), reverse=rank == 1)),
            "d": [{"buffer": buffer, "weight": torch.ones(5)}],
        }
        shared = SharedState(tree, [("b", "declared")], frozenset([buffer.data_ptr()]))
        assert set(shared.digests()) == {("a", "mine"), ("c", "x"), ("c", "y"), ("d", 0)}
        shared.take_from_rank_0([("a", "mine")])
        one.save(4, shared, {}, {})
    for one in savers:
        one.wait()
    loaded, _, _ = load_checkpoint(tmp_path / "step-00000004")
    assert {name: t.tolist() for name, t in loaded["a"]["mine"].items()} == {
        0: [0.0] * 9,
        1: [0.0] * 9,
    }
    assert [t.tolist() for t in loaded["b"]["declared"]] == [[0.0] * 7] * 3
    assert list(loaded["c"]) == ["x", "y"]
    assert (loaded["c"]["x"].sum(), loaded["c"]["y"].sum()) == (8, 0)
    assert loaded["d"][0]["buffer"].tolist() == [0.0] * 50
    assert loaded["d"][0]["weight"].tolist() == [1.0] * 5
