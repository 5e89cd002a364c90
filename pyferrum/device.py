"""Devices: where arrays live and calls run. Functions run on the device of their arguments."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from pyferrum import _native
from pyferrum.errors import InvalidArgument, StateError


class Device:
    """An open device with its kernels and its arena of pages.

    Args:
        name: "cpu" or "metal"; None takes `PYFERRUM_DEVICE`, else "metal" on macOS and "cpu" elsewhere.
        threads: CPU threads, the caller's included; None takes `PYFERRUM_NUM_THREADS`, else one per core.
        arena_bytes: bound on the memory of all states; None takes `PYFERRUM_ARENA_BYTES`, else half of the
            machine's. Memory is used as it is needed, not up front.
        exact: every row takes the same order of sums however many come with it, in prefill too; None takes
            `PYFERRUM_EXACT`, else False. The CPU device is exact either way.
        instruction_set: "avx512", "avx2", "neon" or "portable"; None takes `PYFERRUM_CPU_ISA`, else the best here.
        poison: fill freed pages and buffers with NaN, to find stale reads; None takes `PYFERRUM_DEBUG_POISON`.

    Raises:
        DeviceError: no such device or instruction set on this machine.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        threads: int | None = None,
        arena_bytes: int | None = None,
        exact: bool | None = None,
        instruction_set: str | None = None,
        poison: bool | None = None,
    ) -> None:
        self._handle: Any = _native.device_new(
            name or os.environ.get("PYFERRUM_DEVICE") or ("metal" if sys.platform == "darwin" else "cpu"),
            threads=_count("threads", threads, "PYFERRUM_NUM_THREADS"),
            exact=bool(_count("exact", exact, "PYFERRUM_EXACT")),
            arena_bytes=_count("arena_bytes", arena_bytes, "PYFERRUM_ARENA_BYTES"),
            instruction_set=instruction_set or os.environ.get("PYFERRUM_CPU_ISA", ""),
            poison=bool(_count("poison", poison, "PYFERRUM_DEBUG_POISON")),
        )
        self._cache: dict[Any, Any] = {}
        self._lock = threading.Lock()

    @property
    def handle(self) -> Any:
        """The native device."""
        if self._handle is None:
            raise StateError("this device was closed")
        return self._handle

    def cached(self, key: Any, make: Any) -> Any:
        """`make()`, once per key and device: compiled things that depend on nothing but the key."""
        found = self._cache.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._cache:
                self._cache[key] = make()
            return self._cache[key]

    def info(self) -> dict[str, Any]:
        """Name, instruction set, threads and memory of the device, and the library's build fingerprint."""
        return _native.device_describe(self.handle) | {"build": _native.build_fingerprint()}

    def arena_stats(self) -> dict[str, int]:
        """Pages of the arena: limit, in use, free, peak, handed out so far and copied so far."""
        return _native.arena_stats(self.handle)

    def close(self) -> None:
        """Let go of the device; it ends when its last array and state do. Idempotent."""
        self._handle = None
        self._cache.clear()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._handle is None:
            return "Device(closed)"
        info = self.info()
        return f"Device({info['name']}, {info['instruction_set']}, threads={info['threads']})"


def _count(name: str, value: int | None, variable: str) -> int:
    text = os.environ.get(variable, "0") if value is None else value
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0 or number >= 1 << 63 or (name == "threads" and number > 256):
        source = variable if value is None else name
        raise InvalidArgument(f"{source}: expected a whole number, 0 for the default, got {text!r}")
    return number


_default: Device | None = None
_default_lock = threading.Lock()


def default_device() -> Device:
    """The device that functions use for arguments that live on none: opened on first use."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Device()
        return _default


def device_info(device: Device | None = None) -> dict[str, Any]:
    """`Device.info` of a device, by default the default one."""
    return (device or default_device()).info()


def arena_stats(device: Device | None = None) -> dict[str, int]:
    """`Device.arena_stats` of a device, by default the default one."""
    return (device or default_device()).arena_stats()
