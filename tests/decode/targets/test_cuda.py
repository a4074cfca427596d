"""The GPU runtime, here on a CPU: what is padded, and passes of few sizes as a GPU captures them."""

from __future__ import annotations

from random import Random

import pytest
import torch

from specds.decode.contracts import Captures
from specds.decode.targets import make_target
from specds.decode.targets.cuda import CudaTarget
from specds.errors import UnsupportedModel

from ...conftest import make_model
from .mixtures import Mixture, by_network
from .passes import CPU


@pytest.mark.parametrize(("family", "top"), [(family, number % 2 == 0) for number, family in enumerate(CPU)])
@pytest.mark.parametrize("graphs", [False, True])
def test_any_mixture_of_requests_gives_each_what_the_network_says(family: str, top: bool, graphs: bool) -> None:
    """Also where rows, items and positions are padded to a size, over buffers that are used again."""
    model = make_model(family)
    target = CudaTarget(model, Captures(hidden=True, layer=2, top=top), memory=600_000, graphs=graphs)
    Mixture(target, by_network(model), near, Random(family), top=top).run(passes=10)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=2e-4, rtol=1e-4)


def test_quantised_weights_go_the_generic_way() -> None:
    model = make_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    for runtime in ("cpu", "cuda"):
        with pytest.raises(UnsupportedModel, match="quantised"):
            make_target(model, runtime)
    del model.config.quantization_config
