"""`specds export` as its users meet it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specds.datastore.creation import create_store
from specds.tokenizer import Tokenizer

from ..conftest import fill
from ..tools import Run, corpus_of, damage, edit_manifest, random_documents, snapshot


@pytest.fixture
def store(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    path = tmp_path / "code.ds"
    fill(create_store(path, tokenizer), random_documents(20))
    fill(create_store(path, tokenizer), [([7, 8], [9, 10, 9])], source="[bold]other\x1b[2J")
    return path


def test_documents_go_to_stdout_and_nothing_else_does(store: Path, run_cli: Run) -> None:
    before = snapshot(store)
    result = run_cli("export", store)
    assert (result.code, result.err) == (0, "")
    found = {one["doc_id"]: (one["prompt_tokens"], one["response_tokens"]) for one in result.records}
    assert found == corpus_of(store)
    assert snapshot(store) == before
    one = run_cli("export", store, "--to", "jsonl", "--source", "[bold]other\x1b[2J").records
    assert [record["doc_id"] for record in one] == ["[bold]other\x1b[2J-0"]


def test_text_needs_the_tokenizer(store: Path, run_cli: Run, tiny_directory: Path, tmp_path: Path) -> None:
    for record in run_cli("export", store, "--text", "--model", tiny_directory).records:
        assert len(record["response"].split()) + record["response_tokens"].count(1) >= len(record["response_tokens"])
    # The store names a model that is nowhere to be found; then the tokens can still be had.
    run_cli("export", store, "--text").refused("tiny")
    edit_manifest(store, lambda manifest: manifest["tokenizer"].update(fingerprint="0" * 64))
    run_cli("export", store, "--text", "--model", tiny_directory).refused("tokenizer")


@pytest.mark.parametrize("to", ["jsonl", "parquet", "llama-cpp"])
def test_files_replace_files(to: str, store: Path, run_cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "here"
    out.write_text("old")
    result = run_cli("export", store, "--to", to, "-o", out)
    assert (result.code, result.out) == (0, "")
    assert "21 documents" in result.err
    assert out.read_bytes() != b"old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    if to == "parquet":
        assert set(pq.read_table(out).column("doc_id").to_pylist()) == set(corpus_of(store))
    run_cli("export", store, "--to", to, "-o", tmp_path).refused("not a file")
    run_cli("export", store, "--to", to, "-o", store / "manifest.json").refused("inside the store")
    run_cli("export", store, "--to", to, "-o", out, "--source", "x\x1b[2J").refused("no source", code=2)


def test_a_reader_that_stops_early(store: Path) -> None:
    code = "import sys, specds.cli.main; sys.argv = ['specds', *sys.argv[1:]]; specds.cli.main.run()"
    command = [sys.executable, "-c", code, "export", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, "")


def test_wrong_usage(store: Path, run_cli: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_cli("export", store, "--to", "arctic", "-o", out).refused("jsonl, parquet, llama-cpp", code=2)
    run_cli("export", store, "--to", "parquet").refused("--output", code=2)
    run_cli("export", store, "--to", "llama-cpp").refused("--output", code=2)
    run_cli("export", store, "--to", "llama-cpp", "--text", "-o", out).refused("--text", code=2)
    assert not out.exists()


@pytest.mark.parametrize("how", ["truncated", "halved", "emptied", "missing", "grown", "flipped"])
@pytest.mark.parametrize("to", ["jsonl", "parquet", "llama-cpp"])
def test_a_damaged_corpus_is_refused_and_no_file_is_left(
    how: str, to: str, store: Path, run_cli: Run, tmp_path: Path
) -> None:
    damage(store / "corpus/part-00001.parquet", how)
    run_cli("export", store, "--to", to, "-o", tmp_path / "out").refused("part-00001.parquet")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(store)
    run_cli("export", store).refused("not a datastore")


def test_lines_are_json_whatever_the_names(store: Path, run_cli: Run) -> None:
    lines = run_cli("export", store).out.splitlines()
    assert all(line.isascii() and set(json.loads(line)) >= {"doc_id", "source"} for line in lines)
