"""Rules that name the cause of a loss, one module per topic.

Each rule gets all the evidence, and returns the cause's id, a sentence and the figures that it is
based on, or None if it does not explain the measurements.
"""
