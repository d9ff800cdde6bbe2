"""Rules for functions of torch that compute with pieces of split tensors.

Importing this package registers them.
"""

from . import layers, products

RULES_OF = (layers, products)
