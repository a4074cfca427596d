"""Runtimes of the target by name. A new one is a file here and a line below."""

from __future__ import annotations

from specds.decode.contracts import Target
from specds.decode.registry import load
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


def make_target(model: LanguageModel, runtime: str = "auto", *, hidden: bool = False) -> Target:
    """The target of a model.

    Raises:
        UsageError: no such runtime.
        UnsupportedModel: the runtime cannot run the model.
    """
    runtime = choose_runtime(model, runtime)
    if runtime == "generic":
        from specds.decode.targets.generic import TESTED, check_tree_attention

        if model.architecture not in TESTED:
            check_tree_attention(model)
    target: Target = load(TARGETS, runtime, "runtime")(model, hidden=hidden)
    return target
