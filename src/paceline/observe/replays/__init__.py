"""Store what ranks have trained, and train it again on one."""
