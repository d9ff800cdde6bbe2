"""Checks of DistributedOptimizer: equal to one process with the global batch."""

import copy
import warnings

import pytest
import torch
from horovod_checks import check, main, process_set_of
from torch import nn

import paceline.compat.horovod.torch as hvd
from paceline.compat.horovod.core.coordinator import Coordinator
from paceline.compat.horovod.torch import gradient_exchange

SAMPLES = 24  # of the global batch; a multiple of all numbers of ranks


def new_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 1)
    ).to(dtype)


def batch(step, dtype=torch.float32):
    """Return the global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(SAMPLES, 6, generator=generator).to(dtype)
    return inputs, inputs.sum(1, keepdim=True).sin()


def part(tensor):
    """Return this rank's part of a batch."""
    return tensor[hvd.rank() :: hvd.size()]


def loss_of(model, step, of_rank=True, dtype=torch.float32):
    inputs, labels = batch(step, dtype)
    if of_rank:
        inputs, labels = part(inputs), part(labels)
    return (model(inputs) - labels).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def one_process(make, steps=4, passes=1, scale=1.0, dtype=torch.float32, model=None):
    """Return a model that one process has trained, whose loss is multiplied by ``scale``."""
    model = new_model(dtype=dtype) if model is None else model
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            (scale * loss_of(model, passes * step + i, False, dtype)).backward()
        optimizer.step()
    return model


def all_ranks(make, steps=4, passes=1, dtype=torch.float32, model=None, names=True, **options):
    """Return a model that all ranks have trained, and its optimizer."""
    model = new_model(dtype=dtype) if model is None else model
    named = model.named_parameters() if names else None
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=named, backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, passes * step + i, dtype=dtype).backward()
        optimizer.step()
    return model, optimizer


def same(found, expected, **tolerances):
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            one, other, msg=lambda text, name=name: f"{name}: {text}", **tolerances
        )


@check
def sgd_equals_one_process():
    same(all_ranks(sgd)[0], one_process(sgd))


@check
def adam_equals_one_process():
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.02)

    same(all_ranks(adam, dtype=torch.float64)[0], one_process(adam, dtype=torch.float64))


@check
def losses_equal_one_process():
    alone, model = new_model(), new_model()
    of_one, of_all = sgd(alone.parameters()), hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(5):
        for one, optimizer, whole in ((alone, of_one, True), (model, of_all, False)):
            optimizer.zero_grad()
            loss = loss_of(one, step, not whole)
            loss.backward()
            optimizer.step()
            if whole:
                expected = loss.detach()
        mean = hvd.allreduce(loss.detach(), name=f"loss.{step}")
        torch.testing.assert_close(mean, expected)


@check
def parameters_without_names():
    same(all_ranks(sgd, names=False)[0], one_process(sgd))


@check
def accumulation_equals_one_process():
    same(all_ranks(sgd, passes=3)[0], one_process(sgd, passes=3))


@check
def number_of_passes_can_be_changed():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    for step in range(3):
        optimizer.zero_grad()
        for i in range(2):
            loss_of(model, 2 * step + i).backward()
        optimizer.step()
    same(model, one_process(sgd, steps=3, passes=2))


@check
def step_before_all_passes_exchanges_what_there_is():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=4)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    same(model, one_process(sgd, steps=3))


@check
def float16_compression_is_within_rounding():
    found = all_ranks(sgd, compression=hvd.Compression.fp16)[0]
    same(found, one_process(sgd), rtol=0.02, atol=2e-3)
    assert all(one.grad.dtype == torch.float32 for one in found.parameters())


@check
def compression_of_a_script():
    class Double(hvd.compression.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor.double(), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx)

    same(all_ranks(sgd, compression=Double)[0], one_process(sgd))


@check
def predivide_factor_changes_nothing_but_rounding():
    same(all_ranks(sgd, gradient_predivide_factor=2.5)[0], one_process(sgd))


@check
def sum_is_the_average_times_ranks():
    same(all_ranks(sgd, op=hvd.Sum)[0], one_process(sgd, scale=float(hvd.size())))


@check
def number_of_groups():
    for groups in (1, 2, 100):
        same(all_ranks(sgd, groups=groups)[0], one_process(sgd))


@check
def lists_of_groups():
    model = new_model()
    groups = [[model[0].weight, model[4].bias], [model[2].weight]]  # others are on their own
    same(all_ranks(sgd, model=model, groups=groups, passes=2)[0], one_process(sgd, passes=2))


@check
def num_groups_is_a_former_name():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same(all_ranks(sgd, num_groups=2)[0], one_process(sgd))
    assert any("replaced by `groups`" in str(one.message) for one in said)


@check
def groups_with_compression():
    found = all_ranks(sgd, groups=2, compression=hvd.Compression.fp16)[0]
    same(found, one_process(sgd), rtol=0.02, atol=2e-3)


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, words):
        return self.out(self.table(words).mean(1))


def words_of(step):
    return torch.randint(0, 20, (SAMPLES, 4), generator=torch.Generator().manual_seed(step))


def train_words(model, optimizer, of_rank, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        words = part(words_of(step)) if of_rank else words_of(step)
        (model(words) - words.float().mean(1, keepdim=True) / 20).square().mean().backward()
        optimizer.step()


@check
def sparse_gradients_equal_one_process():
    alone, model = Words(), Words()
    train_words(alone, torch.optim.SGD(alone.parameters(), lr=0.5), of_rank=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train_words(model, optimizer, of_rank=True)
    assert model.table.weight.grad.is_sparse
    same(model, alone)


@check
def changed_sparse_gradients_are_refused():
    if hvd.size() == 1:
        return
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model(part(words_of(0))).sum().backward()
    model.table.weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"gradient of table.weight was changed.*HINT"):
        optimizer.step()


@check
def sparse_gradients_as_dense():
    alone, model = Words(), Words()
    alone.table.sparse = False
    train_words(alone, torch.optim.Adam(alone.parameters(), lr=0.05), of_rank=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=True)
    if hvd.size() == 1:
        model.table.sparse = False  # nothing is exchanged, so nothing is made dense
    train_words(model, optimizer, of_rank=True)
    same(model, alone)


@check
def sparse_gradients_on_some_ranks_only():
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train_words(model, optimizer, of_rank=True, steps=1)
    before = model.table.weight.detach().clone()
    optimizer.zero_grad()
    last = hvd.rank() == hvd.size() - 1
    loss = model(torch.tensor([[7]])) if last else model.out(torch.ones(1, 3))
    loss.sum().backward()
    optimizer.step()
    moved = (model.table.weight.detach() - before).abs().sum(1)
    assert moved[7] > 0
    assert moved.sum() == moved[7]
    same_on_all_ranks(model)


def same_on_all_ranks(model):
    mine = torch.cat([one.detach().flatten() for one in model.parameters()]).double()
    every = hvd.allgather(mine.unsqueeze(0), name="same")
    assert (every == every[0]).all()


@check
def clipping_after_synchronize():
    def train(model, optimizer, of_rank):
        for step in range(4):
            optimizer.zero_grad()
            (50 * loss_of(model, step, of_rank)).backward()
            if not of_rank:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                continue
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

    alone, model = new_model(), new_model()
    train(alone, sgd(alone.parameters()), False)
    train(model, hvd.DistributedOptimizer(sgd(model.parameters())), True)
    same(model, alone)


@check
def step_with_closure():
    def train(model, optimizer, of_rank):
        losses = []
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step, of_rank)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    alone, model = new_model(), new_model()
    expected = train(alone, sgd(alone.parameters()), False)
    found = train(model, hvd.DistributedOptimizer(sgd(model.parameters())), True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    same(model, alone)


@check
def lbfgs_equals_one_process():
    def train(model, optimizer, of_rank):
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step, of_rank, torch.float64)
                loss.backward()
                return loss

            optimizer.step(closure)

    def lbfgs(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
        )

    alone, model = new_model(dtype=torch.float64), new_model(dtype=torch.float64)
    train(alone, lbfgs(alone), False)
    train(model, hvd.DistributedOptimizer(lbfgs(model)), True)
    same(model, alone, rtol=1e-6, atol=1e-8)


@check
def frozen_parameters_stay():
    def frozen():
        model = new_model()
        model[0].requires_grad_(False)
        return model

    found = all_ranks(sgd, model=frozen())[0]
    same(found, one_process(sgd, model=frozen()))
    assert torch.equal(found[0].weight, frozen()[0].weight)


@check
def parameters_can_be_unfrozen_and_frozen():
    def train(model, optimizer, of_rank):
        model[0].requires_grad_(False)
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(True)
            if step == 4:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            loss_of(model, step, of_rank).backward()
            optimizer.step()

    alone, model = new_model(), new_model()
    model[0].requires_grad_(False)
    train(alone, sgd(alone.parameters()), False)
    train(model, hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters()), True)
    same(model, alone)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.parts = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))

    def forward(self, inputs, order):
        return sum(self.parts[i](inputs) for i in order)


@check
def parameter_without_gradient_on_some_ranks():
    model = Branches()
    start = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    inputs = torch.ones(2, 6)
    model(inputs, [0] if hvd.rank() else [0, 1]).sum().backward()
    optimizer.step()
    same_on_all_ranks(model)
    step = (start.parts[1].bias - model.parts[1].bias).item()
    assert abs(step - 2 / hvd.size()) < 1e-6  # the average of rank 0's gradient and zeros
    assert torch.equal(model.parts[2].weight, start.parts[2].weight)


@check
def order_of_gradients_differs_between_ranks():
    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    alone = Branches()
    of_one = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(6):
        order = [(i + (hvd.rank() + 1) * step) % 4 for i in range(4)]
        optimizer.zero_grad()
        inputs, labels = batch(step)
        (model(part(inputs), order) - part(labels)).square().mean().backward()
        optimizer.step()
        of_one.zero_grad()
        (alone(inputs, range(4)) - labels).square().mean().backward()
        of_one.step()
    same(model, alone)


@check
def weights_used_twice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.one = self.two = nn.Linear(6, 6)
            self.out = nn.Linear(6, 1)

        def forward(self, inputs):
            return self.out(self.two(self.one(inputs).tanh()))

    same(all_ranks(sgd, model=Tied())[0], one_process(sgd, model=Tied()))


@check
def learning_rate_schedulers():
    for before in (True, False):
        alone, model = new_model(), new_model()
        of_one, of_all = sgd(alone.parameters()), sgd(model.parameters())
        pairs = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if before:
                scheduler = torch.optim.lr_scheduler.ExponentialLR(of_all, 0.5)
            of_all = hvd.DistributedOptimizer(of_all, model.named_parameters())
            if not before:
                scheduler = torch.optim.lr_scheduler.ExponentialLR(of_all, 0.5)
            pairs = [
                (alone, of_one, torch.optim.lr_scheduler.ExponentialLR(of_one, 0.5), False),
                (model, of_all, scheduler, True),
            ]
            for step in range(4):
                for one, optimizer, schedule, of_rank in pairs:
                    optimizer.zero_grad()
                    loss_of(one, step, of_rank).backward()
                    optimizer.step()
                    schedule.step()
        assert of_all.param_groups[0]["lr"] == of_one.param_groups[0]["lr"] == 0.1 * 0.5**4
        same(model, alone)


@check
def state_can_be_saved_and_loaded():
    model, optimizer = all_ranks(sgd, steps=2)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    other = new_model(seed=9)
    again = hvd.DistributedOptimizer(sgd(other.parameters()), other.named_parameters())
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for step in (2, 3):
        again.zero_grad()
        loss_of(other, step).backward()
        again.step()
    same(other, one_process(sgd))


@check
def state_from_before_remains():
    model = one_process(sgd, steps=0)
    optimizer = sgd(model.parameters())
    loss_of(model, 0, False).backward()
    optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    same(model, one_process(sgd))


@check
def parameter_groups_can_be_added():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model[0].parameters()))
    optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()]})
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    same(model, one_process(sgd))


@check
def gradient_scaler():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    same(model, one_process(sgd))


@check
def two_models_in_turns():
    one, other = new_model(0), new_model(5)
    optimizers = [
        hvd.DistributedOptimizer(
            sgd(model.parameters()),
            [(f"{name}.{of}", parameter) for of, parameter in model.named_parameters()],
        )
        for name, model in (("one", one), ("other", other))
    ]
    for step in range(4):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    same(one, one_process(sgd))
    same(other, one_process(sgd, model=new_model(5)))


@check
def optimizer_can_be_wrapped_again():
    model = new_model()
    optimizer = sgd(model.parameters())
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    same(model, one_process(sgd))


@check
def copies_of_a_model_exchange_nothing():
    model, _ = all_ranks(sgd, steps=1)
    double = copy.deepcopy(model)
    if hvd.rank() == 0:
        loss_of(double, 3).backward()
    assert hvd.allreduce(torch.ones(1), name="alive").item() == 1.0


@check
def channels_last_gradients():
    def convolution():
        torch.manual_seed(4)
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def train(model, optimizer, of_rank):
        for step in range(3):
            images = torch.randn(SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            images = images.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(part(images) if of_rank else images).square().mean().backward()
            optimizer.step()

    alone, model = convolution(), convolution()
    train(alone, sgd(alone.parameters()), False)
    train(model, hvd.DistributedOptimizer(sgd(model.parameters())), True)
    same(model, alone)


@check
def exchange_begins_during_the_backward_pass():
    submitted = []
    original, limit = Coordinator.submit, gradient_exchange.BATCH_BYTES

    def submit(self, operations, *args):
        submitted.extend(one.request.name for one in operations)
        return original(self, operations, *args)

    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    Coordinator.submit, gradient_exchange.BATCH_BYTES = submit, 1
    try:
        seen = []
        model[0].weight.register_hook(lambda _: seen.extend(submitted))
        loss_of(model, 0).backward()
    finally:
        Coordinator.submit, gradient_exchange.BATCH_BYTES = original, limit
    if hvd.size() > 1:
        assert {f"allreduce.{n}" for n in ("4.weight", "4.bias", "2.weight", "2.bias")} <= set(seen)
        assert set(submitted) == {f"allreduce.{name}" for name, _ in model.named_parameters()}
    optimizer.step()


@check
def gradients_are_submitted_at_the_end_of_the_backward_pass():
    """A rank may wait for another operation between backward and step, and others after it."""
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if hvd.rank() % 2:
            optimizer.step()
        total = hvd.allreduce(torch.ones(1), name="between", op=hvd.Sum)
        if not hvd.rank() % 2:
            optimizer.step()
        assert total == hvd.size()
    same(model, one_process(sgd))


@check
def ranks_with_fewer_batches_join():
    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    of_one = sgd(alone.parameters())
    for step in range(hvd.rank() + 1):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    for step in range(hvd.size()):
        of_one.zero_grad()
        inputs, labels = batch(step)
        for rank in range(step, hvd.size()):  # ranks that have joined contribute zeros
            each = inputs[rank :: hvd.size()], labels[rank :: hvd.size()]
            ((alone(each[0]) - each[1]).square().mean() / hvd.size()).backward()
        of_one.step()
    same(model, alone)


@check
def sparse_gradients_in_groups():
    alone, model = Words(), Words()
    train_words(alone, torch.optim.SGD(alone.parameters(), lr=0.5), of_rank=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=1)
    train_words(model, optimizer, of_rank=True)
    same(model, alone)


@check
def use_before_init_is_refused():
    hvd.shutdown()
    try:
        model = new_model()
        with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
            hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    finally:
        hvd.init()
    same(all_ranks(sgd)[0], one_process(sgd))


@check
def groups_of_two_optimizers_in_one_backward_pass():
    one, other = new_model(0), new_model(5)
    optimizers = [
        hvd.DistributedOptimizer(
            sgd(model.parameters()),
            [(f"{name}.{of}", parameter) for of, parameter in model.named_parameters()],
            groups=1,
        )
        for name, model in (("one", one), ("other", other))
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(one, step) + loss_of(other, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    same(one, one_process(sgd, steps=3))
    same(other, one_process(sgd, steps=3, model=new_model(5)))


@check
def transposed_parameters():
    def transposed():
        model = new_model()
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model

    assert not transposed()[0].weight.is_contiguous()
    same(all_ranks(sgd, model=transposed())[0], one_process(sgd))


@check
def step_hooks_run_once():
    model = new_model()
    optimizer = sgd(model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer = hvd.DistributedOptimizer(optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loss_of(model, 0).backward()
    optimizer.step()
    assert calls == ["before", "after"]


@check
def process_set_of_even_ranks():
    even = list(range(0, hvd.size(), 2))
    process_set = process_set_of(even)
    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        process_set=process_set,
    )
    start = copy.deepcopy(model)
    model(torch.full((1, 6), float(hvd.rank() + 1)), [0]).sum().backward()
    optimizer.step()
    members = even if hvd.rank() in even else [hvd.rank()]
    mean = sum(one + 1 for one in members) / len(members)
    torch.testing.assert_close(model.parts[0].weight, start.parts[0].weight - mean)


@check
def adasum_combines_updates():
    model, alone = new_model(dtype=torch.float64), new_model(dtype=torch.float64)
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum
    )
    start = copy.deepcopy(model)
    own = sgd(alone.parameters())
    for one, each in ((model, optimizer), (alone, own)):
        loss_of(one, 0, dtype=torch.float64).backward()
        each.step()
    for name, parameter in alone.named_parameters():
        begin = dict(start.named_parameters())[name].detach()
        every = hvd.allgather((parameter.detach() - begin).unsqueeze(0), name=f"own.{name}")
        combined = list(every.unbind())
        while len(combined) > 1:
            combined = [adasum(a, b) for a, b in zip(combined[::2], combined[1::2], strict=True)]
        found = dict(model.named_parameters())[name]
        torch.testing.assert_close(found.detach(), begin + combined[0])


def adasum(one, other):
    dot = (one * other).sum()
    return one * (1 - dot / (2 * one.square().sum())) + other * (
        1 - dot / (2 * other.square().sum())
    )


@check
def adasum_has_nothing_to_skip():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
    if hvd.size() > 1:
        with (
            pytest.raises(AssertionError, match="not supported when using Adasum"),
            optimizer.skip_synchronize(),
        ):
            pass


@check
def adasum_has_no_process_sets():
    process_set = process_set_of([0])
    if hvd.size() > 1:
        with pytest.raises(
            NotImplementedError, match="Adasum does not support non-global process sets"
        ):
            hvd.DistributedOptimizer(
                sgd(new_model().parameters()), op=hvd.Adasum, process_set=process_set
            )


@check
def zero_grad_after_backward_is_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, 0).backward()
    if hvd.size() > 1:
        with pytest.raises(
            AssertionError, match=r"was called after loss.backward.* but before.* prohibited"
        ):
            optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()


@check
def too_many_passes_are_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, 0).backward()
    if hvd.size() > 1:
        with pytest.raises(
            AssertionError, match=r"more than backward_passes_per_step .1. times.*increase"
        ):
            loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match="was changed between"):
            optimizer.synchronize()  # the second pass has changed the first gradient
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    same_on_all_ranks(model)


@check
def gradient_changed_in_flight_is_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    if hvd.size() == 1:
        optimizer.step()
        return
    with pytest.raises(
        RuntimeError, match=r"the gradient of 4\.bias was changed.*HINT: call optimizer.synchron"
    ):
        optimizer.step()


@check
def gradient_removed_in_flight_is_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, 0).backward()
    model.zero_grad()
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match=r"optimizer.zero_grad.. before backward"):
            optimizer.step()


@check
def second_synchronize_warns():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    loss_of(model, 0).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("without optimizer.skip_synchronize() context" in str(one.message) for one in said)
    same_on_all_ranks(model)


@check
def copy_of_an_optimizer_is_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    double = copy.deepcopy(optimizer)
    with pytest.raises(
        RuntimeError, match=r"does not exchange gradients. HINT: call hvd.DistributedOptimizer"
    ):
        double.step()


def refused(pattern, kind=ValueError, model=None, **options):
    model = new_model() if model is None else model
    with pytest.raises(kind, match=pattern):
        hvd.DistributedOptimizer(sgd(model.parameters()), **options)


@check
def names_must_be_pairs():
    model = new_model()
    refused("sequence of tuples .name, parameter.*HINT", named_parameters=model.parameters())


@check
def names_must_differ():
    model = new_model()
    pairs = [("same", one) for one in model.parameters()]
    refused("must be unique. Found duplicates: same", model=model, named_parameters=pairs)


@check
def names_must_cover_all_parameters():
    model = new_model()
    pairs = list(model.named_parameters())[:-1]
    refused(r"not named: parameter 5 of group 0, shape \(1,\)", model=model, named_parameters=pairs)


@check
def passes_must_be_positive():
    refused("backward_passes_per_step must be > 0, not 0", backward_passes_per_step=0)


@check
def predivide_needs_average():
    refused("not supported with op != Average", op=hvd.Sum, gradient_predivide_factor=2.0)


@check
def predivide_must_be_positive():
    refused("gradient_predivide_factor must be > 0", gradient_predivide_factor=0.0)


@check
def number_of_groups_must_not_be_negative():
    refused("groups should be a non-negative integer", groups=-1)


@check
def groups_must_be_lists_of_tensors():
    refused("groups should be a non-negative.*item 0 is not a list of torch.Tensor", groups=["a"])
    refused("groups should be a non-negative.*of type str", groups="a")


@check
def groups_must_not_overlap():
    model = new_model()
    one = model[0].weight
    refused("can only appear once in groups", model=model, groups=[[one], [one]])


@check
def only_optimizers_are_wrapped():
    with pytest.raises(ValueError, match="wraps an optimizer of torch, not a Sequential"):
        hvd.DistributedOptimizer(new_model())


if __name__ == "__main__":
    main()
