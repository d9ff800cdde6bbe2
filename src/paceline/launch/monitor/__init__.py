"""Watch a running job: failures, out of memory, hangs, stacks, output, live records."""
