"""The exceptions that Horovod's interface raises."""


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagree about it, or a rank has ended."""


class HorovodShutdownError(HorovodInternalError):
    """A collective could not complete because a rank has left."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """The hosts of an elastic job have changed.

    Attributes:
        skip_sync: Whether the state of the ranks need not be synchronized again.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
