"""IBM's ddl where it is installed, or Paceline's implementation; see paceline/compat/ddl."""

from paceline.compat.horovod.import_alias import replace_ddl

replace_ddl(__name__)
