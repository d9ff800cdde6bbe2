"""Models, gradients, optimizers and their schedules."""
