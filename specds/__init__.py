"""specds: draft datastores that make language models decode faster, losslessly and without training.

The public names are imported on first use, so that `import specds` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specds.errors import SpecdsError
from specds.version import __version__

if TYPE_CHECKING:
    from specds.datastore.creation import create_store
    from specds.datastore.store import Store, open_store
    from specds.decode.answering import Answer
    from specds.decode.draft import Draft
    from specds.decode.engine import Engine
    from specds.decode.method import Method
    from specds.model import LanguageModel, load_model

_HOME = {
    "Answer": "specds.decode.answering",
    "Draft": "specds.decode.draft",
    "Engine": "specds.decode.engine",
    "LanguageModel": "specds.model",
    "Method": "specds.decode.method",
    "Store": "specds.datastore.store",
    "create_store": "specds.datastore.creation",
    "load_model": "specds.model",
    "open_store": "specds.datastore.store",
}

__all__ = [
    "Answer",
    "Draft",
    "Engine",
    "LanguageModel",
    "Method",
    "SpecdsError",
    "Store",
    "__version__",
    "create_store",
    "load_model",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'specds' has no attribute {name!r}")
