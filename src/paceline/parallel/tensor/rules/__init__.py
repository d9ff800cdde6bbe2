"""Rules for functions of torch that compute with pieces of split tensors.

Importing this package registers them.
"""

from . import layers, losses, products
from . import layers as order
from . import products as attention

RULES_OF = (attention, layers, losses, order, products)
