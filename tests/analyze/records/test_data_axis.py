"""Each sample counts once, also if ranks of a model-parallel group train it together."""

import pytest
from records import Rank, report_of

from paceline.record.ring.states import Op, State

STEPS = 10


def trained(folder, rank, size, groups=None, **meta):
    """Return a rank with steps of 20 ms: forward from 2 to 8, backward from 10 to 16."""
    made = Rank(folder, rank, size, groups=groups, **meta)
    made.step(0, 10)
    for step in range(STEPS):
        begin = 10 + 20 * step
        made.was(State.FORWARD, begin + 2, begin + 8, step=step + 1)
        made.was(State.BACKWARD, begin + 10, begin + 16, step=step + 1)
        made.step(begin, begin + 20, samples=8, number=step + 1)
    return made


def reduces(rank, at, group="0", op=Op.ALL_REDUCE):
    for step in range(STEPS):
        begin = 10 + 20 * step + at
        rank.collective(begin, begin, begin + 1, op=op, group=group, amount=4096)


def sends(rank, at, op, peer, group="0"):
    for step in range(STEPS):
        begin = 10 + 20 * step + at
        number = rank.number[group]
        fields = {"seq": step + 1, "group": number, "op": op, "peer": peer, "step": step + 1}
        rank.was(State.BLOCKED, begin, begin + 1, **fields)
        rank.was(State.COLLECTIVE, begin, begin + 1, **fields)


def samples_per_step(ranks):
    report = report_of(ranks)
    return report.samples / STEPS, report.doubts


def test_ranks_that_reduce_gradients_have_their_own_samples(tmp_path):
    ranks = [trained(tmp_path, i, 2, batches=[1, 2]) for i in range(2)]
    for rank in ranks:
        reduces(rank, 14)  # DDP
        reduces(rank, 17)  # by hand, before the optimizer
    assert samples_per_step(ranks) == (16, [])


@pytest.mark.parametrize("name", ["batches", "inputs"])
def test_ranks_that_reduce_activations_of_the_same_batch_count_once(tmp_path, name):
    ranks = [trained(tmp_path, i, 2, **{name: [1, 2]}) for i in range(2)]
    for rank in ranks:
        reduces(rank, 4)
        reduces(rank, 12)
    assert samples_per_step(ranks) == (8, [])


def test_ranks_that_reduce_in_the_forward_with_other_batches_count_each(tmp_path):
    """A loss over all ranks inside of the model is no tensor parallelism."""
    ranks = [trained(tmp_path, i, 2, batches=[1, i]) for i in range(2)]
    for rank in ranks:
        reduces(rank, 4)
    assert samples_per_step(ranks) == (16, [])


def test_report_says_where_the_batches_are_not_known(tmp_path):
    ranks = [trained(tmp_path, i, 2) for i in range(2)]
    for rank in ranks:
        reduces(rank, 4)
    samples, (doubt,) = samples_per_step(ranks)
    assert samples == 8
    assert "ranks 0-1 exchange activations" in doubt


def test_stages_of_a_pipeline_count_once_and_its_replicas_each(tmp_path):
    """Ranks 0 and 1 are the stages of one replica, 2 and 3 those of another."""
    ranks = []
    for i in range(4):
        groups = {f"pipe{i // 2}": (2, i % 2), f"data{i % 2}": (2, i // 2)}
        rank = trained(tmp_path, i, 4, groups, batches=[i // 2])
        if i % 2 == 0:
            sends(rank, 9, Op.SEND, 1, f"pipe{i // 2}")
        else:
            sends(rank, 1, Op.RECV, 0, f"pipe{i // 2}")
        reduces(rank, 17, f"data{i % 2}")
        ranks.append(rank)
    assert samples_per_step(ranks) == (16, [])


def test_neighbours_that_swap_values_between_steps_count_each(tmp_path):
    ranks = [trained(tmp_path, i, 2) for i in range(2)]
    for i, rank in enumerate(ranks):
        sends(rank, 1, Op.SEND, 1 - i)
        sends(rank, 1, Op.RECV, 1 - i)
        reduces(rank, 17)
    assert samples_per_step(ranks) == (16, [])


def test_report_says_if_ranks_never_exchange_anything(tmp_path):
    samples, (doubt,) = samples_per_step([trained(tmp_path, i, 2) for i in range(2)])
    assert samples == 16
    assert "never exchange gradients" in doubt


def test_mesh_of_the_record_says_who_shares_samples(tmp_path):
    """Traffic that looks like data parallelism is not asked."""
    places = [[stage, data] for stage in range(2) for data in range(2)]
    ranks = [
        trained(
            tmp_path,
            i,
            4,
            mesh={"axes": [["stage", 2], ["data", 2]], "place": place, "groups": {"0": "all"}},
        )
        for i, place in enumerate(places)
    ]
    for rank in ranks:
        reduces(rank, 14)
    report = report_of(ranks)
    assert (report.samples / STEPS, report.doubts) == (16, [])
    assert [group.name for group in report.groups] == ["all #0"]


def test_ranks_without_a_common_mesh_are_judged_by_their_traffic(tmp_path):
    mesh = {"axes": [["data", 1], ["tensor", 2]], "place": [0, 0]}
    ranks = [trained(tmp_path, 0, 2, mesh=mesh), trained(tmp_path, 1, 2)]
    for rank in ranks:
        reduces(rank, 14)
    assert samples_per_step(ranks)[0] == 16
