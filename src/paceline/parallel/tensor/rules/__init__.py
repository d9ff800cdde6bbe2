"""Rules for functions of torch that compute with pieces of split tensors.

Importing this package registers them.
"""

from . import attention, layers, losses, pointwise, products, shapes

RULES_OF = (attention, layers, losses, pointwise, products, shapes)
