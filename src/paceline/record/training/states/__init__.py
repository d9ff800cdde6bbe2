"""States besides models and optimizers (averaged copies, running statistics, tensors of objects),
and the lines that change states.
"""
