"""Correction tables: how often the target picked one token where another was drafted (CSD, §4.2), as a Parquet file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specds.datastore.manifest import Identity, Provenance
from specds.errors import (
    CorruptTable,
    ForeignTable,
    InputError,
    OutputError,
    StoreLocked,
    StoreVersionError,
    UsageError,
)
from specds.files import locked, replacing, target_of
from specds.parquet import reading
from specds.parquet_bounds import BoundedFile

FREQUENCY = 6
"""λ: how often a divergence must have been seen for a draft to be accepted (CSD, §5.1)."""

FORMAT = "specds correction table"
VERSION = 1
_KEY = b"specds"
_MOST_PAIRS = 1 << 26
_BATCH_ROWS = 1 << 16
_MOST_JSON = 64 << 20
# Sums of counts and of tables stay whole numbers of 64 bits.
_MOST_COUNTED = 1 << 60
_WHOSE = ("target", "draft", "tokenizer")


@dataclass(frozen=True, slots=True)
class Pair:
    """Who drafts for whom: counts of one pair say nothing about another.

    Attributes:
        target: the model that verifies.
        draft: the draft model, or the drafter.
        tokenizer: of both.
        vocabulary: how many tokens there are.
    """

    target: Identity
    draft: Identity
    tokenizer: Identity
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Table:
    """Counts of divergences, with where they come from.

    Attributes:
        pair: whose they are.
        drafted, picked, count: int32[n], int32[n], int64[n], ascending by (drafted, picked), each pair once.
        prompts, tokens: how many were decoded to count.
        done: digests of the prompts that calibrations have counted, ascending: none counts twice.
        history: the commands that wrote it.
    """

    pair: Pair
    drafted: NDArray[np.int32]
    picked: NDArray[np.int32]
    count: NDArray[np.int64]
    prompts: int = 0
    tokens: int = 0
    done: tuple[str, ...] = ()
    history: tuple[Provenance, ...] = ()

    def __len__(self) -> int:
        return len(self.count)

    def keys(self) -> list[int]:
        """Its pairs, by `key_of`."""
        keys: list[int] = _keys(self).tolist()
        return keys

    @classmethod
    def empty(cls, pair: Pair) -> Table:
        """A table of nothing."""
        return cls(pair, np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))

    def plus(
        self,
        counts: Mapping[int, int],
        *,
        prompts: int = 0,
        tokens: int = 0,
        done: Collection[str] = (),
        history: Sequence[Provenance] = (),
    ) -> Table:
        """This table and more counts, by `key_of`."""
        keys = np.concatenate([_keys(self), np.fromiter(counts.keys(), np.int64, len(counts))])
        summed = np.concatenate([self.count, np.fromiter(counts.values(), np.int64, len(counts))])
        unique, places = np.unique(keys, return_inverse=True)
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, places, summed)
        known = [*self.history, *(one for one in history if one not in self.history)]
        return dataclasses.replace(
            self,
            drafted=(unique >> 32).astype(np.int32),
            picked=(unique & 0xFFFFFFFF).astype(np.int32),
            count=total,
            prompts=self.prompts + prompts,
            tokens=self.tokens + tokens,
            done=tuple(sorted({*self.done, *done})),
            history=tuple(sorted(known, key=lambda one: (one.date, one.command))),
        )

    def pruned(self, *, least: int = 1, top: int | None = None, decay: float = 1.0, cap: int | None = None) -> Table:
        """Fewer or smaller counts.

        Args:
            decay: counts are multiplied by it and rounded down.
            cap: and cut off at it.
            least: pairs with smaller counts go.
            top: and all but so many of the largest; of equal counts the smaller token ids stay.
        """
        count = np.floor(self.count * decay).astype(np.int64)
        count = np.minimum(count, cap) if cap is not None else count
        kept = np.flatnonzero(count >= max(least, 1))
        if top is not None:
            kept = np.sort(kept[np.argsort(-count[kept], kind="stable")[:top]])
        return dataclasses.replace(self, drafted=self.drafted[kept], picked=self.picked[kept], count=count[kept])

    @property
    def highest(self) -> int:
        """The largest count; 0 where there is none."""
        return int(self.count.max(initial=0))

    def head_share(self, share: float = 0.2) -> float:
        """The share of all divergences that the most frequent pairs have (CSD, §3.2: 69 % in the top 20 %)."""
        if not len(self):
            return 0.0
        head = np.sort(self.count)[::-1][: max(1, round(share * len(self)))]
        return float(head.sum() / self.count.sum())


def key_of(drafted: int, picked: int) -> int:
    """One number for a pair of token ids, ascending with the pair."""
    return drafted << 32 | picked


def merge(tables: Sequence[Table]) -> Table:
    """The sum of tables of one pair; the order does not matter.

    Raises:
        ForeignTable: they are of different pairs.
        UsageError: two of them hold counts of the same calibration, which would count twice.
    """
    total = tables[0]
    for other in tables[1:]:
        check_pair(other, total.pair, "one table", "the other")
        if twice := set(total.done) & set(other.done):
            raise UsageError(
                f"two of the tables hold the counts of {len(twice):,} prompts both",
                "they would count twice; merge tables of different prompts",
            )
        counts = dict(zip(_keys(other).tolist(), other.count.tolist(), strict=True))
        total = total.plus(counts, prompts=other.prompts, tokens=other.tokens, done=other.done, history=other.history)
    return total


def check_pair(table: Table, pair: Pair, name: str, ours: str = "this run") -> None:
    """Refuse a table of another pair.

    Raises:
        ForeignTable: target, draft, tokenizer or vocabulary differ.
    """
    for what in ("tokenizer", "target", "draft"):
        its, own = getattr(table.pair, what), getattr(pair, what)
        if its.fingerprint != own.fingerprint:
            raise ForeignTable(
                f"{name} is of the {what} {its.name} ({its.fingerprint[:12]}), "
                f"and {ours} has {own.name} ({own.fingerprint[:12]})",
                "calibrate a table for this pair: specds calibrate-csd",
            )
    if table.pair.vocabulary != pair.vocabulary:
        raise ForeignTable(f"{name} has {table.pair.vocabulary:,} tokens, and {ours} {pair.vocabulary:,}")


def check_tokenizer(table: Table, fingerprint: str, name: str, where: str) -> None:
    """Refuse to show a table's tokens with another tokenizer.

    Raises:
        ForeignTable: it is another.
    """
    if table.pair.tokenizer.fingerprint != fingerprint:
        raise ForeignTable(f"{where} holds tokens of {table.pair.tokenizer.name}, not of {name}", "give its --model")


def describe(table: Table) -> dict[str, Any]:
    """A table in figures, as `specds table inspect --json` prints it."""
    pair = table.pair
    return {
        "target": dataclasses.asdict(pair.target),
        "draft": dataclasses.asdict(pair.draft),
        "tokenizer": dataclasses.asdict(pair.tokenizer),
        "vocabulary": pair.vocabulary,
        "pairs": len(table),
        "divergences": int(table.count.sum()),
        "highest": table.highest,
        "head_share": round(table.head_share(), 4),
        "prompts": table.prompts,
        "tokens": table.tokens,
        "history": [dataclasses.asdict(one) for one in table.history],
    }


def difference(one: Table, other: Table) -> list[tuple[int, int, int, int]]:
    """(drafted, picked, count here, count there) of pairs counted differently, the most different first."""
    here = dict(zip(_keys(one).tolist(), one.count.tolist(), strict=True))
    there = dict(zip(_keys(other).tolist(), other.count.tolist(), strict=True))
    changed = [key for key in here.keys() | there.keys() if here.get(key, 0) != there.get(key, 0)]
    changed.sort(key=lambda key: (-abs(here.get(key, 0) - there.get(key, 0)), key))
    return [(key >> 32, key & 0xFFFFFFFF, here.get(key, 0), there.get(key, 0)) for key in changed]


def read_table(path: Path) -> Table:
    """A table, every field of it checked.

    Raises:
        InputError: there is no such file.
        CorruptTable: it is truncated, edited, or no correction table.
        StoreVersionError: a newer version wrote it.
    """
    import pyarrow as pa

    if not path.is_file():  # a pipe would be waited for
        raise InputError(f"no correction table {path}", "specds calibrate-csd makes one")
    with reading(partial(_corrupt, path)), path.open("rb") as stream, BoundedFile(stream) as file:
        raw = (file.schema.metadata or {}).get(_KEY, b"")
        if len(raw) > _MOST_JSON or file.rows > _MOST_PAIRS:
            raise ValueError("it is larger than any correction table")
        if [(one.name, str(one.type)) for one in file.schema] != _COLUMNS:
            raise ValueError("it has other columns")
        described = _parse(path, raw)
        names = [name for name, _ in _COLUMNS]
        columns = pa.Table.from_batches(file.batches(names, _BATCH_ROWS, whole=True), file.schema)
        if any(columns.column(name).null_count for name, _ in _COLUMNS):
            raise ValueError("it has empty fields")
        drafted, picked, count = (columns.column(name).to_numpy() for name, _ in _COLUMNS)
        about = described.table
        table = dataclasses.replace(
            about, drafted=drafted.astype(np.int32), picked=picked.astype(np.int32), count=count.astype(np.int64)
        )
        if _digest(table) != described.sha256:
            raise ValueError("it was edited: its contents are not what its writer wrote")
        if not _is_sound(table):
            raise ValueError("its pairs are not those of a correction table")
    return table


def write_table(path: Path, table: Table) -> None:
    """Replace a table: a reader sees the old or the new one.

    Raises:
        OutputError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    record = json.dumps({**_described(table), "sha256": _digest(table)}).encode()
    arrays = [pa.array(one) for one in (table.drafted, table.picked, table.count)]
    schema = pa.schema([(name, kind) for name, kind in _COLUMNS], metadata={_KEY: record})
    try:
        with replacing(target_of(path)) as file:
            pq.write_table(pa.Table.from_arrays(arrays, schema=schema), file, compression="zstd")
    except OSError as error:
        raise OutputError(f"cannot write the table {path}: {error.strerror or error}", "choose another path") from error


@contextlib.contextmanager
def updating(path: Path) -> Iterator[None]:
    """While this lasts no other process changes the table at `path`; a lock of a dead one does not count.

    Raises:
        OutputError: the lock file beside it cannot be made.
    """
    with _locked_beside(path, "lock", wait=True):
        yield


@contextlib.contextmanager
def calibrating(path: Path) -> Iterator[None]:
    """While this lasts no other calibration counts into the table at `path`: both might count the same prompts.

    Raises:
        StoreLocked: another one does.
        OutputError: the lock file beside it cannot be made.
    """
    with _locked_beside(path, "calibrating", wait=False):
        yield


@contextlib.contextmanager
def _locked_beside(path: Path, kind: str, *, wait: bool) -> Iterator[None]:
    # Beside the table itself, so that whoever comes to it by another link waits, too.
    path = target_of(path)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path.with_name(f".{path.name}.{kind}"), wait=wait))
        except BlockingIOError as error:
            raise StoreLocked(
                f"another calibration is counting into {path}",
                "wait for it, or count into another table and merge them",
            ) from error
        except OSError as error:
            raise OutputError(
                f"cannot write beside {path}: {error.strerror or error}", "choose another path"
            ) from error
        yield


def add_to_table(
    path: Path,
    pair: Pair,
    counts: Mapping[int, int],
    *,
    prompts: int,
    tokens: int,
    provenance: Provenance,
    done: Collection[str] = (),
) -> Table:
    """Add counts to the table at `path`, or begin one: whole or not at all, beside any number of others doing so.

    Raises:
        ForeignTable, CorruptTable, StoreVersionError: what is there is not a table of this pair; it stays as it is.
        OutputError: it cannot be written.
    """
    with updating(path):
        table = Table.empty(pair)
        if path.exists():
            table = read_table(path)
            check_pair(table, pair, str(path))
        table = table.plus(counts, prompts=prompts, tokens=tokens, done=done, history=[provenance])
        write_table(path, table)
    return table


_COLUMNS = [("draft_token", "int32"), ("target_token", "int32"), ("count", "int64")]


def _keys(table: Table) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = table.drafted.astype(np.int64) << 32 | table.picked.astype(np.int64)
    return keys


def _described(table: Table) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "pair": {name: dataclasses.asdict(getattr(table.pair, name)) for name in _WHOSE},
        "vocabulary": table.pair.vocabulary,
        "prompts": table.prompts,
        "tokens": table.tokens,
        "done": list(table.done),
        "history": [dataclasses.asdict(one) for one in table.history],
    }


def _digest(table: Table) -> str:
    digest = hashlib.sha256(json.dumps(_described(table), sort_keys=True).encode())
    for column in (table.drafted, table.picked, table.count):
        digest.update(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _is_sound(table: Table) -> bool:
    """Whether pairs ascend, are of the vocabulary, and were counted."""
    if not len(table):
        return True
    least = min(int(table.drafted.min()), int(table.picked.min()))
    largest = max(int(table.drafted.max()), int(table.picked.max()))
    ascend = bool((np.diff(_keys(table)) > 0).all())
    return least >= 0 and largest < table.pair.vocabulary and ascend and int(table.count.min()) >= 1 and _adds_up(table)


def _adds_up(table: Table) -> bool:
    return float(table.count.astype(np.float64).sum()) < _MOST_COUNTED


class _Described(NamedTuple):
    """What a table's file says about itself: the table without its counts, and the digest of all."""

    table: Table
    sha256: Any


def _parse(path: Path, raw: bytes) -> _Described:
    """The description of a table, every field of it checked.

    Raises:
        StoreVersionError: a newer version wrote it.
        ValueError: a field is missing, or of another type.
    """
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError("it does not describe itself as one")
    version = record.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"its version is {str(version)[:40]!r}")
    if version > VERSION:
        raise StoreVersionError(f"{path} is of version {version}, and this specds reads {VERSION}", "update specds")
    done = record.get("done")
    if not isinstance(done, list) or any(not isinstance(one, str) for one in done) or done != sorted(set(done)):
        raise ValueError("it does not say which prompts it counts")
    history = record.get("history")
    if not isinstance(history, list):
        raise ValueError("it does not say how it came to be")
    pair = record.get("pair")
    if not isinstance(pair, dict) or pair.keys() != set(_WHOSE):
        raise ValueError("it does not say whose it is")
    target, draft, tokenizer = (Identity(**_texts(pair[name], Identity)) for name in _WHOSE)
    return _Described(
        dataclasses.replace(
            Table.empty(Pair(target, draft, tokenizer, _count(record, "vocabulary"))),
            prompts=_count(record, "prompts"),
            tokens=_count(record, "tokens"),
            done=tuple(done),
            history=tuple(Provenance(**_texts(one, Provenance)) for one in history),
        ),
        record.get("sha256"),
    )


def _count(record: dict[str, Any], name: str) -> int:
    number = record.get(name)
    if type(number) is not int or not 0 <= number < _MOST_COUNTED:
        raise ValueError(f"its {name} are not numbers")
    return number


def _texts(value: Any, kind: type[Identity] | type[Provenance]) -> dict[str, str]:
    """The fields of a class of texts, from JSON."""
    names = {one.name for one in dataclasses.fields(kind)}
    if not isinstance(value, dict) or value.keys() != names or any(not isinstance(one, str) for one in value.values()):
        raise ValueError("it does not say whose it is, or how it came to be")
    return value


def _corrupt(path: Path, why: str) -> CorruptTable:
    return CorruptTable(
        f"{path} is damaged or no correction table: {why}",
        "restore it from a copy, or make it again with specds calibrate-csd",
    )
