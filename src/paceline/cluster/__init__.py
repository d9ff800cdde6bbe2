"""What there is: cores, memory, devices. Reads files and variables; starts nothing."""
