"""The names of ``horovod.tensorflow.compression``. Tensors are compressed for the exchange."""

from ..torch.compression import Compression as Compression
from ..torch.compression import FP16Compressor as FP16Compressor
from ..torch.compression import NoneCompressor as NoneCompressor
