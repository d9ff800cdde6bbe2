"""The names of ``horovod.common.process_sets``."""

from ..core.process_sets import ProcessSet as ProcessSet
from ..core.process_sets import global_process_set as global_process_set
from ..core.world import add_process_set as add_process_set
from ..core.world import process_set_by_id as process_set_by_id
from ..core.world import process_sets as process_sets
from ..core.world import remove_process_set as remove_process_set
