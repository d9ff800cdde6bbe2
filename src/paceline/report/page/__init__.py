"""The report as one page of HTML that opens anywhere and asks nobody for anything."""
