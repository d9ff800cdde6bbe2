"""What is fuzzed: a module each."""
