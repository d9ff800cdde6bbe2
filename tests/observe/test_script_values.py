"""What is known of a script from its code, without running it."""

import pytest
import torch

from paceline.observe import user_lines
from paceline.observe.samples.contents import describe_dataset
from paceline.observe.samples.sampler_lines import stream_lines


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that runs a text as a script's module, with names it can use."""
    monkeypatch.chdir(tmp_path)
    user_lines.is_users_file.cache_clear()

    def run(text, **names):
        path = tmp_path / "train.py"
        path.write_text(text)
        scope = {"__name__": "script", **names}
        exec(compile(text, str(path), "exec"), scope)
        return scope

    return run


def test_lists_of_samples_are_known_by_their_contents():
    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randint(9, (3,), generator=generator), {"label": n}) for n in range(6)]

    one, same, other = (describe_dataset(made(seed))["root_checksum"] for seed in (0, 0, 1))
    assert one == same != other
    assert describe_dataset([object()] * 3)["root_checksum"] == 0


STREAMS = """
class Ordered:
    def __iter__(self):
        for at in range(9):
            yield torch.Generator().manual_seed(at), self.sample(at)
    def sample(self, at):
        return at
class Shuffled:
    def __iter__(self):
        yield from self.order()
    def order(self):
        rng = random.Random(3)
        rng.shuffle(self.numbers)
        return self.numbers
"""


def test_line_where_a_stream_shuffles(script):
    found = script(STREAMS)
    assert stream_lines(found["Ordered"]()) == {}
    assert stream_lines(found["Shuffled"]()) == {"sampler_seed_line": "train.py:12"}
