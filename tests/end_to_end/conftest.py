"""The real model gets all cores that no other test runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _all_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    yield
    torch.set_num_threads(before)
