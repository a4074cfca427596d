"""Runtimes of the target by name. A new one is a file here and a line below."""

from __future__ import annotations

from specds.decode.contracts import Captures, Target
from specds.decode.registry import load
from specds.errors import UsageError
from specds.model import LanguageModel

TARGETS = {
    "cpu": "specds.decode.targets.cpu:CpuTarget",
    "cuda": "specds.decode.targets.cuda:CudaTarget",
    "generic": "specds.decode.targets.generic:HuggingFaceTarget",
}


def choose_runtime(model: LanguageModel, runtime: str = "auto") -> str:
    """A runtime's name; for `auto` that of the fastest one that can run the model."""
    if runtime != "auto":
        return runtime
    from specds.decode.targets.llama import unsupported

    return "generic" if unsupported(model) else "cpu"


def require_runtime(model: LanguageModel, runtime: str) -> None:
    """Refuse a runtime that there is not, or that this machine lacks what it takes for.

    Raises:
        UsageError: no such runtime, or the GPU runtime for a model that is on none.
    """
    if runtime != "auto" and runtime not in TARGETS:
        raise UsageError(f"no runtime {runtime!r}", f"one of auto, {', '.join(TARGETS)}")
    if runtime == "cuda" and model.device.type != "cuda":
        raise UsageError(
            f"--runtime cuda runs on a GPU, and {model.name} is on {model.device.type}",
            "--device cuda where there is a GPU; else --runtime auto",
        )


def make_target(
    model: LanguageModel, runtime: str = "auto", captures: Captures | None = None, *, memory: int | None = None
) -> Target:
    """The target of a model.

    Args:
        memory: bytes of its key-value cache, at most; None: half of what is free.

    Raises:
        UsageError: no such runtime, or the model has no such layer.
        UnsupportedModel: the runtime cannot run the model.
    """
    runtime, captures = choose_runtime(model, runtime), captures or Captures()
    layers = int(model.config.num_hidden_layers)
    if captures.layer > layers:
        raise UsageError(f"layer {captures.layer} is asked for, and {model.name} has {layers}", "a lower one")
    if runtime == "generic":
        from specds.decode.targets.generic import TESTED, check_tree_attention

        if model.architecture not in TESTED:
            check_tree_attention(model)
    target: Target = load(TARGETS, runtime, "runtime")(model, captures, memory=memory)
    return target
