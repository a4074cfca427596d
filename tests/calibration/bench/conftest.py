"""Small benches on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specds.calibration.bench.cases import Case
from specds.calibration.bench.contenders import Contender, Ours
from specds.calibration.bench.run import Plan, bench
from specds.decode.engine import Engine
from specds.decode.method import parse_methods
from specds.model import LanguageModel
from specds.reading.prompts import Prompt
from specds.sampling import Sampling

Bench = Callable[..., dict[str, Any]]


def case(number: int, group: str = "one", turns: int = 1, reference: str | None = None) -> Case:
    """A prompt whose text repeats itself, for lookups to find something."""
    words = f"w{number} w{number + 1} w{number + 2} w{number} w{number + 1}"
    messages = tuple(({"role": "user", "content": f"{words} w{turn}"},) for turn in range(turns))
    return Case(f"p{number}", group, Prompt(f"p{number}", messages, reference=reference))


def ours(model: LanguageModel, methods: str, sampling: Sampling | None = None) -> list[Contender]:
    """Contenders by name."""
    return [Ours(method.name, Engine(model, method, sampling or Sampling())) for method in parse_methods(methods)]


@pytest.fixture
def run_bench(tmp_path: Path, tiny: LanguageModel) -> Bench:
    """`run_bench("none,pld@4")` measures in a new directory, `out="…"` in a named one; gives the summary."""
    count = 0

    def run(
        methods: str | list[Contender],
        cases: list[Case] | None = None,
        *,
        out: str | None = None,
        sampling: Sampling | None = None,
        **plan: Any,
    ) -> dict[str, Any]:
        nonlocal count
        count += 1
        path = tmp_path / (out or f"result-{count}")
        contenders = ours(tiny, methods, sampling) if isinstance(methods, str) else methods
        settings = {"max_new_tokens": 16, "warmup": 2, "curve": False, **plan}
        cases = cases or [case(number) for number in range(3)]
        summary = bench(path, tiny, contenders, cases, Plan(sampling=sampling or Sampling(), **settings), {})
        assert summary == json.loads((path / "summary.json").read_text())
        return {**summary, "path": path}

    return run
