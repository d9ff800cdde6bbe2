"""Checks of files, text and connections that are not trusted.

files      open a file that must be a regular one, of this user, of limited size
folders    private folders in shared places (/dev/shm, node-local disks), by descriptors
overlay    folders of the user that runs of a script do not change
removal    folders that Paceline has created, and may remove
processes  starts of Python and of other programs; folders of modules; state of processes
schema     parsed JSON and TOML, checked against types before it is used
text       text of a file, script or job, without control and invisible characters
greeting   authentication of incoming connections, without a thread for each

The threat model is in docs/explanation/security.md. These modules need no torch.
"""
