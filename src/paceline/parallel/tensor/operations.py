"""All rules. Importing this file registers them."""

from .rules import attention, layers, pointwise, products, shapes

RULES_OF = (attention, layers, pointwise, products, shapes)
