"""Every failure of pyferrum, each also a built-in exception, so that code which knows neither still catches it."""

from __future__ import annotations


class FerrumError(Exception):
    """Base of every error that pyferrum raises on purpose."""


class InvalidArgument(FerrumError, ValueError):
    """A shape, dtype, range or combination that a function does not take; the message names the argument."""


class UnsupportedError(FerrumError, NotImplementedError):
    """Valid, but nothing here does it."""


class OutOfPages(FerrumError, MemoryError):
    """The arena has no room for a call; says how many pages were needed, in use and free. Nothing changed."""


class CheckpointError(FerrumError, ValueError):
    """A weight file is damaged, incomplete or not what it says; the message names file and tensor."""


class StateError(FerrumError, RuntimeError):
    """A handle was used after `close()`, or after `fork()` in the child process."""


class DeviceError(FerrumError, RuntimeError):
    """The device failed, or does not exist on this machine."""
