"""What a benchmark ran on: the machine, versions and state of the code at one start of it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from specds.datastore.provenance import provenance
from specds.version import __version__

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "numba", "scann", "faiss-cpu")


def session() -> dict[str, Any]:
    """The machine, the versions and the command, as they are now."""
    import torch

    done = provenance()
    return {
        "date": done.date,
        "command": done.command,
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"specds": __version__, "python": platform.python_version(), **_versions()},
        "git": _git(Path(__file__).parent),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit that specds runs from, and whether files differ from it; None if it is installed from a wheel."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if "site-packages" in folder.parts:
            return None
        return {
            "commit": ask("rev-parse", "HEAD"),
            "changed": bool(ask("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
