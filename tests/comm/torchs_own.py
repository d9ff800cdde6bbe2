"""PyTorch's own tests of collectives and DDP that a CPU backend can pass, with the backend
"paceline": `make test-torch`. They come with torch (torch.testing), each on ranks of its own."""

import os
import re
import tempfile
import unittest

# torch decides by this what a backend can do, when its tests are defined.
os.environ["BACKEND"] = "gloo"
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

import torch
from torch.testing._internal import common_distributed

if not torch.cuda.is_available():  # said before ranks are started for it
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: unittest.skip("it needs GPUs")

from torch.testing._internal.distributed import distributed_test

import paceline  # noqa: F401  makes the backend known, in the ranks too


class Backend(str):
    """What they use; where they ask whether it is gloo, it is one for CPUs as that."""

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
