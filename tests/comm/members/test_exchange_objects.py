"""Paceline's own objects between ranks."""

import ast
import json
import re
from pathlib import Path

import pytest
import ranks

import paceline
from paceline.world.checkpointing import path_from_json, path_to_json

SCRIPT = """
    import dataclasses
    import torch.distributed as dist
    import paceline
    from paceline.comm.members import exchange_objects
    from paceline.comm.members.exchange_objects import all_gather_objects, broadcast_object

    @dataclasses.dataclass
    class Setting:
        name: str
        mib: float | None = None

    world = paceline.init()
    rank, other = world.rank, dist.new_group([1, 2])
    value = (Setting(f"rank {rank}", rank or None), [rank * 1.5] * rank, bytes([rank]))
    schema = tuple[Setting, list[float], bytes]
    expected = [
        (Setting(f"rank {r}", r or None), [r * 1.5] * r, bytes([r])) for r in range(3)
    ]
    assert all_gather_objects(value, schema) == expected
    assert all_gather_objects(float("inf"), float) == [float("inf")] * 3
    assert broadcast_object(value, schema) == expected[0]
    if rank:
        assert all_gather_objects(value, schema, other) == expected[1:]
        assert broadcast_object(value, schema, other) == expected[1]
    exchange_objects.MAX_OBJECT_BYTES = 1000
    for sent, reason in (("text", "the object of rank 1: does not match its format"),
                         ([1] * 1000, "rank 1 sends an object of 3,000 bytes")):
        try:
            all_gather_objects(sent if rank == 1 else 1, int)
        except ValueError as error:
            assert reason in str(error), error
        else:
            raise AssertionError(reason)
    print("done", flush=True)
    """


def test_objects_reach_all_ranks_and_are_checked(tmp_path):
    result = ranks.run(ranks.write(tmp_path, SCRIPT), ranks=3)
    assert result.stdout == "done\n"  # of all ranks


# What reads pickles, and which files may: those of this process itself, or checked beforehand.
UNPICKLES = re.compile(
    r"^(pickle|dill|marshal|shelve|torch)\.(loads?|open|Unpickler)$|^dist.*_object(_list)?$"
)
ALLOWED = {
    "data/loading/workers.py": "what this process has pickled",
    "checkpoint/manifest.py": "weights_only=True, after check_pickle",
    "checkpoint/other_formats.py": "weights_only=True, after check_pickle",
    "observe/replays/stored_run.py": "what this run has stored in its private folder",
    "compat/horovod/torch/objects.py": "between ranks that have proved to be of the job",
    "compat/horovod/torch/elastic/state.py": "commits in the job's private folder",
}


def test_source_unpickles_nothing():
    source = Path(paceline.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"pickle|dill|marshal|shelve|torch\.load|_object", text):
            continue
        names = {ast.unparse(one) for one in ast.walk(ast.parse(text)) if is_name(one)}
        if any(UNPICKLES.search(name) for name in names):
            found.add(str(path.relative_to(source)))
    assert found == ALLOWED.keys()


def is_name(node):
    return isinstance(node, ast.Attribute) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )


@pytest.mark.parametrize(
    "path", [("models", 0), (b"\x00\xff", None, 2.5), (("a", (1, b"x")), True), (1 << 2000,)]
)
def test_paths_of_a_checkpoint_survive_json(path):
    back = path_from_json(json.loads(json.dumps(path_to_json(path))))
    assert back == path
    assert [type(key) for key in back] == [type(key) for key in path]
