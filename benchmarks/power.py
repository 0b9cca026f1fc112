"""Power and clock of an NVIDIA card while something runs on it, read from the driver's management library."""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

INTERVAL_SECONDS = 0.004
CLOCK_SM = 1
POWER_INSTANT = 186  # of nvmlDeviceGetFieldValues; nvmlDeviceGetPowerUsage is an average over a second
POWER_CAP = 0x4  # of the reasons for a lowered clock


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


@dataclass
class Samples:
    """Readings under one name: watts, megahertz, and whether the power cap held the clock down."""

    watts: list[float] = field(default_factory=list)
    megahertz: list[int] = field(default_factory=list)
    capped: list[bool] = field(default_factory=list)

    def summary(self) -> dict[str, float | None]:
        """Medians, and the share of readings under the power cap; None where nothing could be read."""
        return {
            "watts": statistics.median(self.watts) if self.watts else None,
            "megahertz": statistics.median(self.megahertz) if self.megahertz else None,
            "power_capped": statistics.mean(self.capped) if self.capped else None,
        }


class Meter:
    """Samples a card while a context is open. Without the library, or on another vendor's card, it reads nothing."""

    def __init__(self, device: torch.device) -> None:
        self.samples: dict[str, Samples] = {}
        self._card = ctypes.c_void_p()
        try:
            self._library: ctypes.CDLL | None = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._library = None
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        found = self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._card))
        if found:
            self._library = None

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Adds readings to `samples[name]` until the context ends."""
        samples = self.samples.setdefault(name, Samples())
        done = threading.Event()

        def read() -> None:
            while not done.wait(INTERVAL_SECONDS):
                self._read(samples)

        thread = threading.Thread(target=read) if self._library else None
        if thread:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread:
                thread.join()

    def _read(self, samples: Samples) -> None:
        assert self._library
        power = _FieldValue(field=POWER_INSTANT)
        if self._library.nvmlDeviceGetFieldValues(self._card, 1, ctypes.byref(power)) == 0 and power.status == 0:
            # A 4-byte value stands in the first half of the union.
            samples.watts.append((power.value & 0xFFFFFFFF) / 1000)
        clock = ctypes.c_uint()
        if self._library.nvmlDeviceGetClockInfo(self._card, CLOCK_SM, ctypes.byref(clock)) == 0:
            samples.megahertz.append(clock.value)
        reasons = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._card, ctypes.byref(reasons)) == 0:
            samples.capped.append(bool(reasons.value & POWER_CAP))
