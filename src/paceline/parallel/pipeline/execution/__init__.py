"""What the execution of a pipeline is made of: schedules, messages, gradients, random numbers."""
