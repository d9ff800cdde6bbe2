"""Horovod's operations on tensors of TensorFlow: the exchange is that of torch's tensors."""
