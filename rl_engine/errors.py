"""The exceptions this library raises on purpose. Callers' mistakes are plain ``ValueError`` and ``TypeError``."""


class SettingsError(ValueError):
    """An environment variable holds a value that has no meaning."""


class BackendError(LookupError):
    """An operator or a backend was asked for that does not exist or cannot run here."""


class StoreUnusableError(OSError):
    """A cache folder cannot be used: not ours, writable by others, or the file system refuses."""


class LocksUnusableError(StoreUnusableError):
    """Locks do not work in a cache folder, so this process must leave it alone."""


class InvalidRecordError(ValueError):
    """A tuning record is not one that this process may launch from; the message says why."""


class TrialUnavailableError(RuntimeError):
    """A launch cannot be measured now, through no fault of a candidate; the message says why."""
