"""The measurements of ``paceline check``, one file each."""
