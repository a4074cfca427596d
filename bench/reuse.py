"""What a drafter's drafts came from and what became of them: AdaPLD's Tables 10 to 12, from traces.

    specds decode -p F.jsonl -d adapld --budget 48 --trace T.parquet > answers.jsonl
    python bench/reuse.py T.parquet [U.parquet …]

Retrieval: the share of attempts that found an anchor lexically, only semantically, or not at all (E.1). Reuse: the
share of steps in which a drafted token was accepted, those of them on a branch, and the mean accepted length (E.2);
its distribution (E.3). One row a trace; give a trace for each task. Of other drafters the table by source is printed.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pyarrow.parquet as pq


def main() -> None:
    for path in sys.argv[1:]:
        rows = [row for row in pq.read_table(path).to_pylist() if row["step"]]
        print(f"{path}: {len(rows)} steps")
        by_source(rows)
        if any("branch" in source for row in rows for source in row["draft_sources"]):
            retrieval(rows)
            reuse(rows)


def by_source(rows: list[dict[str, Any]]) -> None:
    """Nodes drafted and accepted by source."""
    drafted: Counter[str] = Counter(source for row in rows for source in row["draft_sources"])
    taken: Counter[str] = Counter(sources(row)[index] for row in rows for index in range(row["accepted"]))
    for source, count in drafted.most_common():
        print(f"  {source:24} {count:8} drafted, {taken[source]:6} accepted ({taken[source] / count:.1%})")


def sources(row: dict[str, Any]) -> list[str]:
    """Of the accepted nodes."""
    return [row["draft_sources"][node] for node in row["path"][: row["accepted"]]]


def retrieval(rows: list[dict[str, Any]]) -> None:
    lexical = sum(any(not source.startswith("semantic") for source in row["draft_sources"]) for row in rows)
    semantic = sum(bool(row["draft_sources"]) for row in rows) - lexical
    none = len(rows) - lexical - semantic
    recovered = semantic / max(semantic + none, 1)
    shares = [f"{count / len(rows):.2%}" for count in (lexical, semantic, none)]
    print(f"  lexical {shares[0]}, semantic {shares[1]}, none {shares[2]}; semantic recovery {recovered:.2%}")


def reuse(rows: list[dict[str, Any]]) -> None:
    outcome: Counter[str] = Counter()
    for row in rows:
        places = sources(row)
        if not places:
            outcome["mismatch"] += 1
        elif places[0] == "main":
            outcome["main"] += 1
        else:
            outcome["branch+succ" if len(places) > 1 else "branch"] += 1
    hits = len(rows) - outcome["mismatch"]
    print(
        "  "
        + ", ".join(f"{name} {outcome[name] / len(rows):.1%}" for name in ("main", "branch", "branch+succ", "mismatch"))
    )
    lengths = [row["accepted"] for row in rows if row["accepted"]]
    print(
        f"  reuse rate {hits / len(rows):.2%}, on branches {(hits - outcome['main']) / max(hits, 1):.2%} of it, "
        f"mean length {sum(lengths) / max(len(lengths), 1):.2f}"
    )
    shares = [sum(min(length, 5) == size for length in lengths) / max(len(lengths), 1) for size in range(1, 6)]
    print("  accepted 1, 2, 3, 4, 5 and more: " + ", ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
