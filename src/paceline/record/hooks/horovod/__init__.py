"""Record the communication of an installed Horovod."""
