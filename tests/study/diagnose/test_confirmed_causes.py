"""paceline diagnose confirms causes by experiment on real ranks, before it names them."""

import pytest
import ranks

from paceline.study.diagnose import ladder
from paceline.study.diagnose.diagnose import run_diagnosis
from paceline.study.diagnose.run_script import RunRequest

pytestmark = [pytest.mark.alone, pytest.mark.long]

TRAIN = """
    import gc, mmap, sys, threading
    import torch, torch.distributed as dist
    from torch import nn

    KNOWN = [[i] for i in range(300_000)]  # objects that each collection has to visit

    def count():
        while True:
            for i in range(1000):
                str(i)

    def disturb():
        if fault == "collects":
            gc.collect()
        if fault == "maps":  # as many page faults, but not of the allocator
            with mmap.mmap(-1, 1 << 24) as new:
                torch.frombuffer(new, dtype=torch.uint8).fill_(1)

    fault = sys.argv[1]
    if fault == "counts":
        threading.Thread(target=count, name="counter", daemon=True).start()
    gc.freeze() if fault != "collects" else None
    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
    if fault == "broadcasts":
        net.register_buffer("table", torch.zeros(1 << 22))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 128)
    while True:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        disturb()
    """


@pytest.fixture
def diagnosed(tmp_path, monkeypatch):
    """Return a function that diagnoses the script with one fault."""
    monkeypatch.setattr(ladder, "REPETITIONS", (2, 2))
    monkeypatch.setattr(ladder, "SURVEY_SHARE", 0.01)
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, TRAIN)

    def run(fault):
        asked = RunRequest(str(script), [fault], [], ["--threads", "1"], 2, steps=16, warm=3)
        return run_diagnosis(asked, lambda _: None)

    return run


def test_garbage_collection_in_each_step_is_confirmed(diagnosed):
    found = diagnosed("collects")
    cause = found.causes[0]
    assert (cause.id, cause.confirmed) == ("garbage-collection", "confirmed")
    assert cause.evidence["collections_a_step"] == pytest.approx(1, abs=0.3)
    assert cause.measured.low > 0.3
    assert "mostly in script.py:15" in cause.sentence
    assert "collect-rarely" in [one.knob for one in found.remedies]
    # The line that collects is not reported a second time as other work of the script.
    assert "script" not in [one.id for one in found.causes]


def test_broadcasts_of_buffers_come_first_by_their_own_experiment(diagnosed):
    found = diagnosed("broadcasts")
    cause = found.causes[0]
    assert (cause.id, cause.confirmed) == ("buffer-broadcast", "confirmed")
    assert cause.measured.low > 0.2
    assert cause.evidence["lines"][0]["code"] == "loss = model(x).square().mean()"
    assert "buffers-off" in [one.knob for one in found.remedies]


def test_thread_that_holds_the_interpreter_lock_is_confirmed(diagnosed):
    found = diagnosed("counts")
    cause = next(one for one in found.causes if one.id == "interpreter")
    assert cause.confirmed == "confirmed"
    assert "thread 'counter' (script.py:" in cause.sentence
    assert cause.measured.low > 0.2


def test_page_faults_that_are_not_of_the_allocator_are_no_cause_of_it(diagnosed):
    found = diagnosed("maps")
    assert "memory kept" in found.ladder.rungs
    assert "allocator" not in [one.id for one in found.causes]
    assert "allocator" in [one.id for one in found.unconfirmed]
