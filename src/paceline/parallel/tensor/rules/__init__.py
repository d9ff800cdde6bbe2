"""Rules for functions of torch that compute with pieces of split tensors.

Importing this package registers them.
"""

from . import attention, blocks, layers, losses, memory_order, products

RULES_OF = (attention, blocks, layers, losses, memory_order, products)
