"""Correction tables: sums, files, strangers, damage, and many writers at once."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.datastore.corrections import (
    Pair,
    Table,
    add_to_table,
    calibrating,
    check_pair,
    difference,
    key_of,
    merge,
    read_table,
    updating,
    write_table,
)
from specds.datastore.manifest import Identity, Provenance
from specds.errors import (
    CorruptTable,
    ForeignTable,
    InputError,
    OutputError,
    SpecdsError,
    StoreLocked,
    UnsafeFile,
    UsageError,
)

VOCABULARY = 50
PAIR = Pair(Identity("target", "t1"), Identity("draft", "d1"), Identity("words", "w1"), VOCABULARY)
COMMAND = Provenance("specds calibrate-csd", "1", "2026-01-01T00:00:00+00:00")

counts = st.dictionaries(
    st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, VOCABULARY - 1)), st.integers(1, 1 << 40), max_size=12
)


def table_of(counted: dict[tuple[int, int], int], done: tuple[str, ...] = (), **more: int) -> Table:
    keys = {key_of(*pair): count for pair, count in counted.items()}
    return Table.empty(PAIR).plus(keys, done=done, history=[COMMAND], **more)


def counted(table: Table) -> dict[tuple[int, int], int]:
    pairs = zip(table.drafted.tolist(), table.picked.tolist(), strict=True)
    return dict(zip(pairs, table.count.tolist(), strict=True))


@given(st.lists(counts, min_size=1, max_size=4), st.randoms())
def test_tables_add_up_whatever_the_order(parts: list[dict[tuple[int, int], int]], random: object) -> None:
    tables = [table_of(part, (f"p{number}",), prompts=1, tokens=number) for number, part in enumerate(parts)]
    total = merge(tables)
    expected: Counter[tuple[int, int]] = Counter()
    for part in parts:
        expected.update(part)
    assert counted(total) == dict(expected)
    assert list(counted(total)) == sorted(counted(total))
    shuffled = list(tables)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = merge(shuffled)
    assert counted(again) == counted(total)
    assert (again.prompts, again.tokens, again.done) == (len(parts), sum(range(len(parts))), total.done)


@given(counts)
def test_a_table_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, part: dict[tuple[int, int], int]
) -> None:
    path = tmp_path_factory.mktemp("tables") / "t.parquet"
    table = table_of(part, ("a", "b"), prompts=2, tokens=70)
    write_table(path, table)
    read = read_table(path)
    assert counted(read) == part
    assert (read.pair, read.prompts, read.tokens, read.done) == (PAIR, 2, 70, ("a", "b"))
    assert read.history == (COMMAND,)
    assert [one.name for one in path.parent.iterdir()] == ["t.parquet"]


@given(counts, st.integers(1, 5), st.none() | st.integers(0, 6), st.floats(0, 1), st.none() | st.integers(1, 9))
def test_pruning_forgets_what_is_rare(
    part: dict[tuple[int, int], int], least: int, top: int | None, decay: float, cap: int | None
) -> None:
    kept = counted(table_of(part).pruned(least=least, top=top, decay=decay, cap=cap))
    smaller = {pair: min(int(np.floor(count * decay)), cap or 1 << 62) for pair, count in part.items()}
    expected = {pair: count for pair, count in smaller.items() if count >= least}
    ranked = sorted(expected, key=lambda pair: (-expected[pair], pair))[:top]
    assert kept == {pair: expected[pair] for pair in ranked}


def test_the_head_holds_what_it_holds() -> None:
    table = table_of({(number, 0): 1 for number in range(8)} | {(8, 0): 46, (9, 0): 46})
    assert table.head_share(0.2) == pytest.approx(0.92)
    assert table_of({}).head_share() == 0.0


def test_differences_are_listed_the_largest_first() -> None:
    one, other = table_of({(1, 2): 5, (3, 4): 1, (5, 6): 2}), table_of({(1, 2): 5, (3, 4): 9, (7, 8): 1})
    assert difference(one, other) == [(3, 4, 1, 9), (5, 6, 2, 0), (7, 8, 0, 1)]


@pytest.mark.parametrize("what", ["target", "draft", "tokenizer", "vocabulary"])
def test_tables_of_another_pair_are_refused(what: str) -> None:
    changed = 60 if what == "vocabulary" else Identity("other", "x")
    other = dataclasses.replace(PAIR, **{what: changed})  # type: ignore[arg-type]
    with pytest.raises(ForeignTable, match=r"other|60"):
        check_pair(Table.empty(PAIR), other, "t.parquet")
    with pytest.raises(ForeignTable):
        merge([Table.empty(PAIR), Table.empty(other)])


def test_prompts_never_count_twice() -> None:
    with pytest.raises(UsageError, match="the counts of 1 prompts both"):
        merge([table_of({(1, 2): 1}, ("a", "b")), table_of({(1, 2): 1}, ("b", "c"))])


def test_files_that_are_no_tables_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(InputError, match="no correction table"):
        read_table(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("nonsense")
    with pytest.raises(CorruptTable, match="damaged or no correction table"):
        read_table(tmp_path / "text.parquet")
    pq.write_table(pa.table({"draft_token": [1]}), tmp_path / "other.parquet")
    with pytest.raises(CorruptTable, match="other columns"):
        read_table(tmp_path / "other.parquet")
    with pytest.raises(OutputError, match="cannot write"):
        write_table(tmp_path / "no" / "t.parquet", table_of({}))


def test_an_edited_table_is_refused(tmp_path: Path) -> None:
    """Also one whose file is sound: a count changed with any Parquet tool."""
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    write_table(path, table_of({(1, 2): 5, (3, 4): 6}, prompts=1))
    whole = pq.read_table(path)
    edited = whole.set_column(2, whole.schema.field(2), [[5, 600]])
    pq.write_table(edited, path)
    with pytest.raises(CorruptTable, match="was edited"):
        read_table(path)
    pq.write_table(whole.replace_schema_metadata({}), path)
    with pytest.raises(CorruptTable, match="does not describe itself"):
        read_table(path)


def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path) -> None:
    path, broken = tmp_path / "t.parquet", tmp_path / "broken.parquet"
    write_table(path, table_of({(number, number + 1): number + 1 for number in range(40)}, ("a",), prompts=1))
    whole, expected = path.read_bytes(), counted(read_table(path))
    random = np.random.default_rng(0)
    for size in {0, 1, 4, 8, len(whole) - 1, len(whole) // 2, *random.integers(0, len(whole), 20).tolist()}:
        broken.write_bytes(whole[:size])
        with pytest.raises(CorruptTable):
            read_table(broken)
    refused = 0
    for _ in range(300):
        at = int(random.integers(len(whole)))
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << int(random.integers(8)))]) + whole[at + 1 :])
        try:
            assert counted(read_table(broken)) == expected  # a byte that nothing depends on
        except SpecdsError:
            refused += 1
    assert refused > 150


def feed(path: str, worker: int) -> None:
    for number in range(20):
        new = {key_of(worker, number): 1, key_of(9, 9): 1}
        add_to_table(Path(path), PAIR, new, prompts=1, tokens=2, provenance=COMMAND)


def test_processes_that_feed_one_table_lose_no_count(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    workers = [multiprocessing.get_context("spawn").Process(target=feed, args=(str(path), one)) for one in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    table = read_table(path)
    assert counted(table) == {(one, number): 1 for one in range(4) for number in range(20)} | {(9, 9): 80}
    assert (table.prompts, table.tokens) == (80, 160)


@pytest.mark.parametrize("kind", ["lock", "calibrating"])
@pytest.mark.parametrize("planted", ["link", "pipe", "other name"])
def test_a_lock_that_somebody_planted_beside_a_table_empties_nothing(kind: str, planted: str, tmp_path: Path) -> None:
    """Both may be the same file, which once waited for itself for ever."""
    path = tmp_path / "t.parquet"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for one in ("lock", "calibrating"):
        lock = path.with_name(f".{path.name}.{one}")
        if planted == "link":
            lock.symlink_to(victim)
        elif planted == "pipe":
            os.mkfifo(lock)
        else:
            os.link(victim, lock)
    with contextlib.suppress(UnsafeFile), calibrating(path) if kind == "calibrating" else contextlib.nullcontext():
        with pytest.raises(UnsafeFile, match=r"\.t\.parquet\."), updating(path):
            pass
        with pytest.raises(UnsafeFile):
            add_to_table(path, PAIR, {}, prompts=1, tokens=1, provenance=COMMAND)
    assert victim.read_text() == "precious"
    assert not path.exists()


def test_a_table_behind_the_users_link_is_one_table(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link, real = tmp_path / "t.parquet", tmp_path / "shared" / "real.parquet"
    link.symlink_to(real)
    for path in (link, real, link):
        add_to_table(path, PAIR, {5 << 32 | 6: 1}, prompts=1, tokens=1, provenance=COMMAND)
    assert link.is_symlink()
    assert read_table(real).count.tolist() == [3]
    with calibrating(link), pytest.raises(StoreLocked), calibrating(real):
        pass


def test_a_table_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="no correction table"):
        read_table(tmp_path / "t.parquet")
