"""Checks of files, text and connections that are not trusted.

files          open a file that must be a regular one, of this user, of limited size
folders        private folders in shared places (/dev/shm, node-local disks), by descriptors
handshake      authentication of incoming connections, without a thread for each
outputs        files whose names the user chose
overlay        folders of the user that runs of a script do not change
processes      starts of Python and of other programs; folders of modules; state of processes
removal        folders that Paceline has created, and may remove
run_lock       lock of a folder that one run uses
schema         parsed JSON and TOML, checked against types before it is used
shared_folder  whether all ranks see the same folder
text           text of a file, script or job, without control and invisible characters

The threat model is in docs/explanation/security.md. These modules need no torch.
"""
