"""What texts are compared with."""

from __future__ import annotations

import pytest
import torch

from specds.model import LanguageModel
from specds.reference import LogProbabilities


def test_log_probabilities_are_those_of_one_pass_over_prompt_and_answer(tiny: LanguageModel) -> None:
    judge = LogProbabilities(tiny)
    for prompt, answer in [([9, 30, 12], [5, 77, 9]), ([9, 30, 12], [8]), ([9, 30, 12], [5, 7, 6, 4]), ([7], [9, 9])]:
        with torch.inference_mode():
            logits = tiny.network(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])
        assert judge.of(prompt, answer) == pytest.approx(float(chosen.sum()), abs=1e-3)
