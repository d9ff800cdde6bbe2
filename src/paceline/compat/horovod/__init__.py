"""Horovod's interface: scripts that import Horovod run unchanged on Paceline's exchange.

``torch`` has the names of ``horovod.torch``, ``common`` those of ``horovod.common``. Both are built
on ``core``, which knows no framework: torch is its transport, and tensors are buffers.
"""
