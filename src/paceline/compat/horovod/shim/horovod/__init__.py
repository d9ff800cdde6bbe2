"""Horovod, or Paceline's implementation where Horovod is not installed; see import_alias.py."""

from paceline.compat.horovod.import_alias import replace_shim

replace_shim(__name__)
