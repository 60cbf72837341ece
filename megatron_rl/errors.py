"""The five errors raised on purpose. Each message says what was found, why it cannot work, and the mend."""


class ConfigError(ValueError):
    """The configuration asks for something unknown or impossible."""


class DataError(ValueError):
    """A prompt file, checkpoint, or recorded sample holds something that cannot be used."""


class LayoutError(ValueError):
    """A model cannot be cut over the requested ranks, or two layouts do not cover each other exactly once."""


class SyncError(RuntimeError):
    """A weight update failed; the engine is paused and does not serve a mixture of versions."""


class BackendError(RuntimeError):
    """A process or service outside our control failed: a trainer rank, a rollout server, Ray, a disk."""
