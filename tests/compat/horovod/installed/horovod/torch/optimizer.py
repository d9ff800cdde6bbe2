"""Submits gradients in the backward pass, and waits for them in step(), as Horovod does."""

from horovod.torch.mpi_ops import allreduce_async_, synchronize


def DistributedOptimizer(optimizer, named_parameters):  # noqa: N802  Horovod's name
    handles = []
    for name, parameter in named_parameters:

        def submit(p, name=name):
            handles.append(allreduce_async_(p.grad, name=f"allreduce.{name}"))

        parameter.register_post_accumulate_grad_hook(submit)

    class Distributed(type(optimizer)):
        def step(self):
            for handle in handles:
                synchronize(handle)
            handles.clear()
            return super().step()

    optimizer.__class__ = Distributed
    return optimizer
