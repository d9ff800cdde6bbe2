"""The functions of horovod.torch.mpi_ops with its signatures, over files and without its library.

Tensors are matched by name, in whatever order ranks submit them.
"""

import os
import threading
import time

import torch
import torch.distributed as dist

Average, Sum = 0, 1
_handle_map = {}
_library = None


class ProcessSet:
    def __init__(self, ranks):
        self.ranks, self.process_set_id = ranks, None

    def rank(self):
        return rank()

    def size(self):
        return size()


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def rank():
    return int(os.environ["HOROVOD_RANK"])


def size():
    return int(os.environ["HOROVOD_SIZE"])


def init(*args, **kwargs):
    global _library
    _library = _Library(dist.FileStore(os.path.abspath("store"), size()))


class _Library:
    """Runs each operation in a thread, when all ranks have submitted one of its name."""

    def __init__(self, store):
        self.store, self.handles, self.done = store, 0, {}
        self.counts = {}

    def start(self, name, call):
        self.handles += 1
        handle = self.handles
        name = name or f"noname.{handle}"
        self.counts[name] = count = self.counts.get(name, 0) + 1
        self.done[handle] = threading.Event()
        key = f"{name}/{count}"
        self.store.add(key, 1)
        threading.Thread(target=self.run, args=(key, call, handle), daemon=True).start()
        return handle

    def run(self, key, call, handle):
        while self.store.add(key, 0) < size():
            time.sleep(0.001)
        call(key)
        self.done[handle].set()


def _gathered(tensor, key):
    """Return the tensors of all ranks, by files."""
    name = key.replace("/", "_")
    torch.save(tensor, f"{name}.{rank()}.tmp")
    os.replace(f"{name}.{rank()}.tmp", f"{name}.{rank()}")
    found = []
    for other in range(size()):
        while not os.path.exists(f"{name}.{other}"):
            time.sleep(0.001)
        found.append(torch.load(f"{name}.{other}"))
    return found


def _allreduce_async(tensor, output, name, op, prescale_factor, postscale_factor, process_set):
    def call(key):
        each = torch.stack(_gathered(tensor.detach().clone(), key))
        output.data.copy_(each.mean(0) if op == Average else each.sum(0))

    handle = _library.start(name, call)
    _handle_map[handle] = (tensor, output)
    return handle


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0,
                     postscale_factor=1.0, process_set=global_process_set):  # fmt: skip
    op = Average if op is None else op
    return _allreduce_async(
        tensor, tensor, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce(tensor, average=None, name=None, op=None, process_set=global_process_set):
    output = tensor.new(tensor.shape)
    op = Average if op is None else op
    return synchronize(_allreduce_async(tensor, output, name, op, 1.0, 1.0, process_set))


def _allgather_async(tensor, output, name, process_set):
    def call(key):
        found = torch.cat(_gathered(tensor, key))
        output.resize_(found.shape).copy_(found)

    handle = _library.start(name, call)
    _handle_map[handle] = (tensor, output)
    return handle


def allgather(tensor, name=None, process_set=global_process_set):
    return synchronize(_allgather_async(tensor, tensor.new(), name, process_set))


def _broadcast_async(tensor, output, root_rank, name, process_set):
    handle = _library.start(name, lambda key: output.copy_(_gathered(tensor, key)[root_rank]))
    _handle_map[handle] = (tensor, output)
    return handle


def broadcast_(tensor, root_rank, name=None, process_set=global_process_set):
    return synchronize(_broadcast_async(tensor, tensor, root_rank, name, process_set))


def poll(handle):
    return _library.done[handle].is_set()


def synchronize(handle):
    if handle not in _handle_map:
        return None
    _library.done[handle].wait()
    return _handle_map.pop(handle)[-1]


def join(device=-1):
    handle = _library.start("join", lambda key: _gathered(torch.zeros(1), key))
    _handle_map[handle] = (None, None)
    synchronize(handle)
    return 0


def barrier(process_set=global_process_set):
    handle = _library.start("barrier", lambda key: _gathered(torch.zeros(1), key))
    _handle_map[handle] = (None, None)
    synchronize(handle)
