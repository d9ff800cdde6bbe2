"""The Python samples of the pages run, on two ranks and with small data."""

import re
import textwrap
from pathlib import Path

import pytest
import ranks

import paceline

ROOT = Path(paceline.__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

# What a reader's script has before the sample. The samples of a page run one after the other.
DATA = """
    import torch
    import torch.nn.functional as F
    import paceline
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    images, labels = torch.rand(512, 1, 8, 8), torch.randint(10, (512,))
    dataset = TensorDataset(images, labels)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    validation = DataLoader(dataset, batch_size=64)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
"""
WORLD = DATA + "    world = paceline.init()\n"
PREAMBLES = {
    "README.md": DATA,
    "docs/how-to/run/use-the-python-api.md": DATA,
    "docs/explanation/layouts.md": WORLD
    + "    Model = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n",
    "docs/explanation/spatial-layouts.md": """
    import numpy as np
    import torch
    import torch.nn.functional as F
    import paceline

    world = paceline.init(progress=False)
    model = torch.nn.Conv3d(1, 1, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    volume = target = np.ones((1, 4, 6, 5), np.float32)
    if world.rank == 0:
        import h5py

        with h5py.File("volumes.h5", "w") as file:
            file["x"] = np.ones((2, 1, 4, 6, 5), np.float32)
            file["y"] = np.zeros((2, 4, 6, 5), np.int64)
    world.any(False)  # the file is there
    """,
    "docs/explanation/pipelines.md": WORLD
    + """
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    """,
    "docs/explanation/tensor-layouts.md": """
    import torch
    import paceline

    world = paceline.init(progress=False)
    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    mlp = torch.nn.Sequential(*layers)
    attention = {"qkv": torch.nn.Linear(4, 12), "out": torch.nn.Linear(4, 4)}
    block = torch.nn.ModuleDict({"mlp": mlp, "attention": torch.nn.ModuleDict(attention)})
    block["norm1"] = torch.nn.LayerNorm(4)
    blocks, head = torch.nn.ModuleList([block]), torch.nn.Linear(4, 2)
    model = torch.nn.ModuleDict({"blocks": blocks, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """,
    "docs/how-to/run/average-weights.md": WORLD
    + "    Model = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n",
    "docs/how-to/run/continue-after-a-time-limit.md": WORLD
    + "    model, optimizer = world.distribute(model, optimizer)\n",
    "docs/how-to/improve/large-batches.md": DATA
    + """
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 10))
    """,
    "docs/how-to/run/export.md": WORLD
    + "    model = world.distribute(torch.nn.Sequential(torch.nn.Linear(6, 3)))\n",
    "docs/how-to/improve/pack-and-stage.md": WORLD
    + """
    from paceline.data import pack

    if world.rank == 0:
        pack((images.numpy(), labels.numpy()), "packed")
    torch.distributed.barrier()
    """,
    "docs/how-to/improve/tune.md": """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend("study.journal"))
    optuna.create_study(study_name="study", storage=storage, load_if_exists=True)
    """,
    "docs/reference/training-loop.md": WORLD
    + """
    model, optimizer = world.distribute(model, optimizer)
    x, y = images[:64], labels[:64]
    generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    g_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    c_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    """,
}
# Pages whose samples need what a test machine lacks (a GPU, a scheduler): the reason by page. They
# are compiled by test_pages.py.
CANNOT_RUN: dict[str, str] = {}


def samples(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text())
    return [textwrap.dedent(text) for _, kind, text in found if kind == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_SAMPLES = [page for page in PAGES if samples(page, "python")]


@pytest.mark.parametrize("page", WITH_SAMPLES, ids=name)
def test_python_samples_of_page_run_on_two_ranks(tmp_path, page):
    if name(page) in CANNOT_RUN:
        pytest.skip(CANNOT_RUN[name(page)])
    assert name(page) in PREAMBLES, "PREAMBLES needs what the samples of this page expect"
    parts = [textwrap.dedent(PREAMBLES[name(page)]), *samples(page, "python")]
    script = tmp_path / "sample.py"
    script.write_text("\n".join([*parts, 'print("reached the end")\n']))
    done = ranks.run(script, ranks=2)
    assert "reached the end" in done.stdout
    assert "warning" not in done.stderr.lower(), done.stderr


def test_preambles_belong_to_pages_with_samples():
    assert {*PREAMBLES, *CANNOT_RUN} == {name(page) for page in WITH_SAMPLES}


def test_sample_of_machine_file_is_read(tmp_path):
    from paceline.cost.machine.machine_file import load

    (sample,) = samples(ROOT / "docs/reference/formats/machine-file.md", "toml")
    (tmp_path / "machine.toml").write_text(sample)
    machine = load(tmp_path / "machine.toml")
    assert machine.hosts[0].arithmetic[0].rate.median == 2.01e12


def test_sample_of_settings_file_is_read(tmp_path):
    from paceline.knobs.settings import settings_for_script

    (sample,) = samples(ROOT / "docs/reference/formats/settings-file.md", "toml")
    (tmp_path / "fast.toml").write_text(sample)
    knobs, messages = settings_for_script(tmp_path / "fast.toml", "train.py")
    assert knobs == {"loader-workers": 3}
    assert not messages
