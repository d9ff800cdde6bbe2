"""Elastic training: the names of ``horovod.torch.elastic``."""

from ...common.elastic import ObjectState as ObjectState
from ...common.elastic import State as State
from .run import run as run
from .sampler import ElasticSampler as ElasticSampler
from .state import TorchState as TorchState
