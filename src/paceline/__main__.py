"""``python -m paceline``."""

from .security.processes import drop_working_directory

drop_working_directory()  # before anything else is imported

from .cli import main  # noqa: E402

main()
