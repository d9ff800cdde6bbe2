"""Checks of hvd.elastic within one attempt; test_horovod_elastic.py has those of restarts."""

import torch
from horovod_checks import check, main
from torch import nn
from torch.utils.data import DataLoader

import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.common.elastic import notification_manager
from paceline.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.compat.horovod.torch.elastic import state as states


def new_sampler(samples, **options):
    return hvd.elastic.ElasticSampler(range(samples), **options)


def gathered(values):
    """Return the values of all ranks, in order of the ranks."""
    return [one for each in hvd.allgather_object(list(values)) for one in each]


def model_of(value):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_of(model):
    return model.weight[0, 0].item()


def run(function, state):
    return hvd.elastic.run(function)(state)


@check
def sampler_distributes_all_samples():
    sampler = new_sampler(8 * hvd.size())
    assert len(sampler) == 8
    assert sorted(gathered(sampler)) == list(range(8 * hvd.size()))


@check
def sampler_repeats_samples_until_ranks_have_as_many():
    sampler = new_sampler(4 * hvd.size() + 1, shuffle=False)
    found = gathered(sampler)
    assert len(found) == hvd.size() * len(sampler)
    assert set(found) == set(range(4 * hvd.size() + 1))
    assert gathered(new_sampler(1)) == [0] * hvd.size()


@check
def sampler_of_an_empty_dataset():
    sampler = new_sampler(0)
    assert list(sampler) == []
    assert len(sampler) == 0


@check
def sampler_shuffles_each_epoch_anew():
    sampler, other = new_sampler(20 * hvd.size()), new_sampler(20 * hvd.size(), seed=1)
    first = list(sampler)
    assert first != list(other)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler)


@check
def sampler_has_what_is_left_after_recorded_batches():
    samples = 8 * hvd.size()
    sampler = new_sampler(samples)
    loader = DataLoader(list(range(samples)), batch_size=2, sampler=sampler)
    seen = []
    for number, batch in enumerate(loader):
        if number == 2:
            break
        seen += batch.tolist()
        sampler.record_batch(number, 2)
    assert sampler.processed_num == 4 * hvd.size()
    sampler.reset()
    assert len(sampler) == 4
    rest = [one for batch in loader for one in batch.tolist()]
    assert sorted(gathered(seen + rest)) == list(range(samples))
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert len(sampler) == 8


@check
def sampler_has_what_is_left_after_named_samples():
    samples = 8 * hvd.size()
    sampler = new_sampler(samples)
    state = hvd.elastic.TorchState(sampler=sampler)
    named = sampler.get_indices(0, 3)
    assert named == list(sampler)[:3]
    sampler.record_indices(named)
    state.commit()
    state.restore()
    assert sampler.processed_indices == set(gathered(named))
    assert len(sampler) == 5
    assert sorted(gathered(sampler) + gathered(named)) == list(range(samples))


@check
def sampler_state_can_be_saved_and_loaded():
    sampler, other = new_sampler(12 * hvd.size()), new_sampler(12 * hvd.size())
    sampler.set_epoch(3)
    sampler.record_batch(0, 5)
    other.load_state_dict(sampler.state_dict())
    sampler.reset()
    assert list(other) == list(sampler)
    assert other.epoch == 3
    other.load_state_dict({"epoch": 1, "processed_num": 2})
    assert other.processed_num == 2


@check
def sampler_after_more_samples_than_there_are():
    sampler = new_sampler(4)
    sampler.record_batch(0, 100)
    sampler.reset()
    assert list(sampler) == []


@check
def state_takes_the_values_of_rank_0():
    model = model_of(1.0 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, batch=20 + hvd.rank(), epoch=10 + hvd.rank())
    state.sync()
    assert value_of(state.model) == 1.0
    assert state.optimizer.param_groups[0]["lr"] == 0.5
    assert (state.batch, state.epoch) == (20, 10)


@check
def state_returns_to_the_last_commit():
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=1)
    model.weight.data.fill_(2.0)
    state.batch = 2
    state.restore()
    assert (value_of(model), state.batch) == (1.0, 1)
    model.weight.data.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.25
    state.batch = 3
    state.commit()
    model.weight.data.fill_(4.0)
    optimizer.param_groups[0]["lr"] = 0.125
    state.batch = 4
    state.restore()
    state.restore()
    assert (value_of(model), optimizer.param_groups[0]["lr"], state.batch) == (3.0, 0.25, 3)


@check
def state_of_a_scheduler():
    optimizer = torch.optim.SGD(model_of(1.0).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = hvd.elastic.TorchState(optimizer=optimizer, scheduler=scheduler)
    scheduler.last_epoch += 1 + hvd.rank()
    state.sync()
    assert scheduler.last_epoch == 1
    scheduler.last_epoch = 7
    state.restore()
    assert scheduler.last_epoch == 1


@check
def state_of_several_models():
    one, other = model_of(1.0 + hvd.rank()), model_of(5.0 + hvd.rank())
    state = hvd.elastic.TorchState(generator=one, discriminator=other)
    state.sync()
    assert (value_of(one), value_of(other)) == (1.0, 5.0)


@check
def value_of_a_state_can_be_replaced():
    state = hvd.elastic.TorchState(model=model_of(1.0), epoch=0)
    state.model = model_of(2.0 + hvd.rank())
    state.sync()
    assert value_of(state.model) == 2.0
    state.model.weight.data.fill_(9.0)
    state.restore()
    assert value_of(state.model) == 2.0


@check
def types_can_have_handlers_of_a_script():
    class Counter:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    registry = states.get_handler_registry()
    states.set_handler_registry([*registry, (Counter, states.StateDictHandler)])
    try:
        counter = Counter()
        state = hvd.elastic.TorchState(counter=counter)
        counter.count = 3 + hvd.rank()
        state.sync()
        assert counter.count == 3
    finally:
        states.set_handler_registry(registry)


@check
def object_state():
    state = hvd.elastic.ObjectState(
        bcast_object=hvd.broadcast_object, get_rank=hvd.rank, name="x", value=[hvd.rank()]
    )
    state.sync()
    assert state.value == [0]
    state.value = [1]
    state.commit()
    state.value = [2]
    state.restore()
    assert (state.name, state.value) == ("x", [1])


@check
def all_ranks_hear_of_returned_nodes():
    state = hvd.elastic.TorchState(value=1)
    state.check_host_updates()
    if hvd.rank() == 0:
        state.on_hosts_updated(10.0)
    heard = False
    try:
        state.commit()
    except HostsUpdatedInterrupt as update:
        heard = not update.skip_sync
    assert heard
    state.check_host_updates()


@check
def run_returns_what_the_function_returns():
    def train(state, factor):
        return state.epoch * factor

    state = hvd.elastic.TorchState(epoch=3 + hvd.rank())
    assert hvd.elastic.run(train)(state, factor=2) == 6


@check
def run_restores_the_commit_after_an_internal_error():
    if hvd.size() > 1:
        return
    calls, resets = [], []

    def train(state):
        calls.append(state.batch)
        if len(calls) == 1:
            state.batch = 5
            state.commit()
            state.batch = 7
            raise HorovodInternalError("lost")
        return state.batch

    state = hvd.elastic.TorchState(batch=0)
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    assert run(train, state) == 5
    assert calls == [0, 5]
    assert resets == [5]


@check
def internal_error_ends_a_rank_that_has_others():
    if hvd.size() == 1:
        return

    def train(state):
        raise HorovodInternalError("lost")

    raised = False
    try:
        run(train, hvd.elastic.TorchState(batch=0))
    except HorovodInternalError as error:
        raised = str(error) == "lost"
    assert raised


@check
def run_keeps_the_state_after_returned_nodes():
    resets, calls = [], []

    def train(state):
        calls.append(state.batch)
        if len(calls) == 1:
            state.batch += 1
            notification_manager.handle_hosts_updated(20.0)
            state.check_host_updates()
        return state.batch

    state = hvd.elastic.TorchState(batch=1)
    state.register_reset_callbacks([lambda: resets.append(1)])
    assert run(train, state) == 2
    assert (calls, resets) == ([1, 2], [1])
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="again").tolist() == [hvd.size()] * 2


@check
def other_errors_are_raised():
    def train(state):
        raise KeyError("mine")

    raised = False
    try:
        run(train, hvd.elastic.TorchState(batch=1))
    except KeyError:
        raised = True
    assert raised


if __name__ == "__main__":
    main()
