"""How what stands in a store came to be: the running command, as it would be repeated."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from pathlib import Path

from specds.datastore.manifest import Change, Provenance
from specds.version import __version__

# What the command line takes options from, beside its words.
_OPTION = "SPECDS_"


def provenance() -> Provenance:
    """How the running command would be repeated: options from the environment, its line, the version, and the date."""
    options = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(_OPTION)]
    words = [*options, shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Provenance(" ".join(words)[:2000].encode("utf-8", "replace").decode(), __version__, now)


def history_line(what: str) -> Change:
    """A line for a store's history: what the running command did."""
    return Change(what, provenance())
