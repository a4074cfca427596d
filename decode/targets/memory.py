"""How much memory a key-value cache may take, and where it lies."""

from __future__ import annotations

import contextlib
import mmap
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specds.errors import ModelError

if TYPE_CHECKING:
    import torch

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")
# Where nobody says how much there is.
_UNKNOWN = 4 << 30
# Python knows the flag from 3.13 on. Without it a process with some engines could not fork.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# More tokens are never held at once.
_MOST_PAGES = 1 << 20


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, of its container, of its own limit the least."""
    known = [size for size in (_machine(), _container(), _process()) if size is not None]
    return max(0, min(known, default=_UNKNOWN))


def memory_for(limit: int | None, device: torch.device | None = None) -> int:
    """Bytes of a key-value cache: as many as a user allows, or half of what is free there.

    Args:
        device: where it lies; None: in the machine's own memory.
    """
    if limit is not None:
        return limit
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0] // 2
    return free_memory() // 2


def pages_within(size: int, page: int) -> int:
    """How many pages of so many bytes there may be, at least one."""
    return max(1, min(size // page, _MOST_PAGES))


def _machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _container() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        return limit - int((_CGROUP / "memory.current").read_text())
    return None


def _process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        return limit - int(_STATUS.read_text().split()[0]) * resource.getpagesize()
    return limit


class Arena:
    """Room for pages of numbers, which takes memory only where it was written to.

    Args:
        size: bytes, at most.
        page: bytes of a page.

    Attributes:
        count: pages, at least one.
        numbers: float32[count · page / 4].

    Raises:
        ModelError: there is no room for one page.
    """

    def __init__(self, size: int, page: int) -> None:
        count = pages_within(size, page)
        while True:
            try:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
                memory = mmap.mmap(-1, count * page, flags=flags)
                break
            except (OSError, MemoryError, ValueError) as error:  # a limit that nobody told us
                if count == 1:
                    raise ModelError(
                        f"there is no memory for a key-value cache of {page:,} bytes", "a smaller model"
                    ) from error
                count //= 2
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.count = count
        self.numbers: NDArray[np.float32] = np.frombuffer(memory, np.float32, count * page // 4)
