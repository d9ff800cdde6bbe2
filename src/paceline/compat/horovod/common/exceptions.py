"""The exceptions of ``horovod.common.exceptions``."""

from ..core.errors import HorovodInternalError as HorovodInternalError
from ..core.errors import HorovodShutdownError as HorovodShutdownError
from ..core.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
