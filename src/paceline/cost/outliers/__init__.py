"""Find hosts, links, versions and limits that differ from their peers."""
