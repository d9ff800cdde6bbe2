"""Exchange between hosts: the hierarchy over the ranks that share one."""
