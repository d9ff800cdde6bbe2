"""Rules for functions of torch that compute with pieces of split tensors.

Importing this package registers them.
"""

from . import attention, layers, losses, order, products

RULES_OF = (attention, layers, losses, order, products)
