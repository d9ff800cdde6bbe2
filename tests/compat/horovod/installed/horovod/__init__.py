"""A package with the structure of Horovod 0.28.1, as far as its operations are recorded."""

__version__ = "0.28.1"
