"""What several test files share: the command line in this process, and one that can be killed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specds.datastore import manifest as manifests
from specds.datastore.corpus import read_documents
from specds.datastore.manifest import FileRecord, Manifest
from specds.datastore.store import open_store
from specds.digests import edge_digest, sha256


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, *words: str, code: int = 1) -> None:
        """Assert that this was refused as every refusal should be: one line with a hint, and nothing else."""
        lines = self.err.splitlines()
        assert self.code == code, self
        assert len(lines) == 1, self
        assert lines[0].startswith("error: "), self
        assert " — " in lines[0], f"no hint: {lines[0]}"
        assert "unexpected" not in lines[0], self
        assert "Traceback" not in self.err + self.out, self
        for word in words:
            assert word in lines[0], f"{word!r} not in {lines[0]}"


Run = Callable[..., Result]


def damage(path: Path, how: str) -> None:
    """Truncate, grow, empty, remove a file, or flip a bit in the middle of it."""
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
        return
    middle = len(data) // 2
    path.write_bytes(
        {
            "truncated": data[:-1],
            "halved": data[:middle],
            "emptied": b"",
            "grown": data + b"\0",
            "flipped": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        }[how]
    )


def edit_manifest(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's JSON in place, with a checksum that fits."""
    file = store / manifests.NAME
    body = json.loads(file.read_bytes())
    change(body)
    file.write_text(json.dumps({**body, "digest": manifests.digest(body)}))


def reseal(store: Path) -> None:
    """Make the manifest's sizes and checksums fit whatever is in the files now, as a forger would."""
    manifest = manifests.parse((store / manifests.NAME).read_bytes(), "test")
    files = {
        name: FileRecord((store / name).stat().st_size, sha256(store / name), edge_digest(store / name))
        for name in manifest.files
        if (store / name).exists()
    }
    (store / manifests.NAME).write_bytes(manifests.dump(dataclasses.replace(manifest, files=files)))


def manifest_of(store: Path) -> Manifest:
    """The manifest as it stands."""
    return manifests.parse((store / manifests.NAME).read_bytes(), "test")


def corpus_of(store: Path) -> dict[str, tuple[list[int], list[int]]]:
    """doc id → (prompt, response); fails where an id stands twice."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for document in read_documents(open_store(store)):
        assert document.doc_id not in found, f"{document.doc_id} stands twice"
        found[document.doc_id] = document.prompt.tolist(), document.response.tolist()
    return found


def strays(store: Path) -> list[str]:
    """Files in a store that its manifest does not name."""
    known = {*manifest_of(store).files, manifests.NAME, ".lock", ".readers"}
    names = (path.relative_to(store).as_posix() for path in store.rglob("*") if not path.is_dir())
    return sorted(set(names) - known)


def snapshot(directory: Path) -> dict[str, str]:
    """Every file below a directory and its digest; locks do not count."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (".lock", ".readers")
    }


def random_documents(
    count: int, *, seed: int = 0, vocabulary: int = 128, longest: int = 12
) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) pairs of random tokens; prompts may be empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers([0, 1], longest + 1, (count, 2))
    return [tuple(rng.integers(2, vocabulary, length).tolist() for length in pair) for pair in lengths]  # type: ignore[misc]


_SERVER = """
import json, os, resource, signal, sys, time
import faiss, numpy, scann, sklearn.decomposition, torch, transformers
import specds.cli.main, specds.datastore.build_dense, specds.decode.generation, specds.model
from specds.datastore.suffix_array import build_suffix_array
torch.set_num_threads(1)
# What is imported, compiled and loaded here need not be in every child.
model = specds.model.load_model(sys.argv[1], device="cpu", threads=1)
model.network.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
build_suffix_array(numpy.array([5, 6, 65535], numpy.uint16))

def die_at(wanted, root):
    "End this process, as kill -9 would, before the n-th thing that it does to a file below root."
    count = 0
    def happens():
        nonlocal count
        count += 1
        if count == wanted:
            os._exit(9)
    def below(path):
        "A name without a directory is looked up in one that is open."
        return isinstance(path, (str, os.PathLike)) and (str(path).startswith(root) or not os.path.isabs(path))
    def audit(event, arguments):
        if event == "open":
            writes = isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
            writes = writes or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and below(arguments[0]):
                happens()
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "os.link"):
            if below(arguments[event == "os.link"]):
                happens()
    sync = os.fsync
    def fsync(handle):
        happens()
        sync(handle)
    os.fsync = fsync
    sys.addaudithook(audit)

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(log, 2)
        sys.argv = ["specds", *job["argv"]]
        code = 1
        try:
            if job["room"] is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (job["room"], job["room"]))
            if job["at"]:
                die_at(job["at"], job["root"])
            specds.cli.main.run()
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    began = time.monotonic()
    if job["after"] is not None:
        time.sleep(job["after"])
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, time.monotonic() - began]), flush=True)
"""


class Mortal:
    """Runs `specds` in processes that can be killed; they are forked from one that has imported everything."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.seconds = 0.0

    def run(
        self,
        argv: Sequence[object],
        *,
        at: int | None = None,
        root: Path | None = None,
        after: float | None = None,
        room: int | None = None,
    ) -> int:
        """Run a command to its end, to its `at`-th change of a file below `root`, or for `after` seconds.

        Args:
            room: no file can grow beyond so many bytes, as on a full disk.

        Returns:
            its exit code; 9 if it died at `at`, -9 if it was killed.
        """
        job = {"argv": list(map(str, argv)), "at": at, "root": str(root), "after": after, "room": room}
        job["log"] = str(self._log)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code, self.seconds = json.loads(self._process.stdout.readline())
        return int(code)

    @property
    def said(self) -> str:
        """What the last command printed on stderr."""
        return self._log.read_text(errors="replace")


@contextmanager
def mortal(log: Path, model: Path) -> Iterator[Mortal]:
    """The process that mortals are forked from; it has loaded the model."""
    command = [sys.executable, "-c", _SERVER, str(model)]
    # One thread, because a pool of threads does not survive a fork.
    single = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=single) as process:
        yield Mortal(process, log)
        assert process.stdin is not None
        process.stdin.close()
