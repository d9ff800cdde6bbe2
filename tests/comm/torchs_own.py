"""PyTorch's tests of collectives and DDP for CPU backends, run with the backend "paceline".

`make test-torch` runs them. The tests are part of torch (torch.testing); each starts new ranks.
"""

import os
import re
import tempfile
import unittest

# torch reads this when the tests are defined, to decide which tests a backend supports.
os.environ["BACKEND"] = "gloo"
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

import torch
from torch.testing._internal import common_distributed

if not torch.cuda.is_available():  # skip before ranks are started
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: unittest.skip("it needs GPUs")

from torch.testing._internal.distributed import distributed_test

import paceline  # noqa: F401  registers the backend, also in the ranks


class Backend(str):
    """The backend's name, which also equals "gloo", so that tests treat it as a CPU backend."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return other in (str.__str__(self), "gloo")

    def __ne__(self, other):
        return not self == other


distributed_test.BACKEND = Backend("paceline")

WANTED = re.compile(
    r"test_(all_reduce|reduce_scatter|all_gather|broadcast|barrier|DistributedDataParallel|ddp_|"
    r"accumulate_gradients|static_graph|grads_same|get_future|undefined_grad|SyncBatchNorm)"
)
OTHERS = re.compile(r"cuda|nccl|gpu|amp|mixed_precision|half|timeout")


class TestOverMemory(
    distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


for _name in dir(TestOverMemory):
    if _name.startswith("test_") and (not WANTED.match(_name) or OTHERS.search(_name)):
        setattr(TestOverMemory, _name, None)
