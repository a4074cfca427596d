"""The normalizer against the paper's equations, computed another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import linalg

from specds.datastore.normalizer import Normalizer


def states(count: int = 500, width: int = 24, seed: int = 0) -> NDArray[np.float32]:
    """Correlated, shifted and of very different scales, as hidden states are."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(count, width)) @ rng.normal(size=(width, width))
    return (mixed * rng.uniform(0.01, 100, width) + rng.normal(0, 50, width)).astype(np.float32)


def reference(
    sample: NDArray[np.float32], queries: NDArray[np.float32], dims: int
) -> tuple[NDArray[np.float64], float]:
    """DReSD Eq. 1 and 2 in float64: z-score, eigenvectors of the covariance, unit length."""
    sample, queries = sample.astype(np.float64), queries.astype(np.float64)
    mean, deviation = sample.mean(0), sample.std(0)
    values, vectors = linalg.eigh(np.cov(((sample - mean) / deviation).T))
    first = vectors[:, np.argsort(values)[::-1][:dims]]
    reduced = ((queries - mean) / deviation) @ first
    share = float(np.sort(values)[::-1][:dims].sum() / values.sum())
    return reduced / np.linalg.norm(reduced, axis=1, keepdims=True), share


@pytest.mark.parametrize("dims", [1, 8, 24])
def test_keys_are_those_of_the_equations(dims: int) -> None:
    sample, queries = states(), states(50, seed=0) + 1
    normalizer = Normalizer.fit(sample, dims)
    keys = normalizer.keys(queries)
    expected, share = reference(sample, queries, dims)
    signs = np.sign((keys * expected).sum(0))
    np.testing.assert_allclose(keys * signs, expected, atol=2e-3)
    assert normalizer.explained_variance == pytest.approx(share, abs=1e-3)
    assert normalizer.sampled == len(sample)


def test_keys_have_unit_length_and_similarities_are_cosines() -> None:
    normalizer = Normalizer.fit(states(), 8)
    keys = normalizer.keys(states(60, seed=3))
    assert keys.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(keys, axis=1), 1, atol=1e-5)


def test_fitting_in_pieces_is_fitting_at_once() -> None:
    """More rows than one piece holds; memory-mapped files are read in pieces."""
    few = states(700, 4)
    many = np.tile(few, (100, 1))
    assert len(many) > 65_536
    a, b = Normalizer.fit(few, 3), Normalizer.fit(many, 3)
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-4)
    np.testing.assert_allclose(a.scale, b.scale, rtol=1e-4)
    np.testing.assert_allclose(np.abs((a.components * b.components).sum(1)), 1, atol=1e-3)


def test_constant_dimensions_do_no_harm() -> None:
    sample = states()
    sample[:, 3] = 7.0
    keys = Normalizer.fit(sample, 8).keys(sample)
    assert np.isfinite(keys).all()
    # A state that is exactly the mean has no direction; it must still give numbers.
    normalizer = Normalizer.fit(sample, 8)
    assert np.isfinite(normalizer.keys(normalizer.mean[None])).all()


def test_saved_and_loaded_it_gives_the_same_keys(tmp_path: Path) -> None:
    normalizer = Normalizer.fit(states(), 8)
    normalizer.save(tmp_path / "n.safetensors")
    loaded = Normalizer.load(tmp_path / "n.safetensors")
    np.testing.assert_array_equal(loaded.keys(states(30, seed=4)), normalizer.keys(states(30, seed=4)))
    assert (loaded.explained_variance, loaded.sampled) == (normalizer.explained_variance, normalizer.sampled)


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\xff" * 64, b"not safetensors at all"])
def test_another_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "n.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="safetensors"):
        Normalizer.load(tmp_path / "n.safetensors")


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = Normalizer.fit(states(), 8)
    bad = Normalizer(good.mean[:-1], good.scale, good.components, 1.0, 1)
    bad.save(tmp_path / "n.safetensors")
    with pytest.raises(ValueError, match="do not fit"):
        Normalizer.load(tmp_path / "n.safetensors")
