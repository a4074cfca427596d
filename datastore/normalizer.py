"""z-score, PCA and unit length: from a hidden state to the key that is searched for (DReSD §3.2–3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specds.errors import CorruptStore
from specds.files import create
from specds.jit import compiled_loosely

_EPSILON = 1e-6
_CHUNK = 16_384
# What a fit gives at most: scale is 1 / √(Var + ε), and components are rows of unit length. With larger numbers a key
# would not be one. A state is far below this, in any model that computes with 16 bits.
_MOST_MEAN, _MOST_SCALE, _MOST_COMPONENT = 1e9, 1.001 / _EPSILON**0.5, 1.001


@dataclass(frozen=True, slots=True)
class Normalizer:
    """The fitted transformation.

    Attributes:
        mean, scale: float32[d], of the sampled hidden states (Eq. 1; scale = 1 / √(Var + ε)).
        components: float32[dims, d], the first principal components W of the z-scored sample.
        explained_variance: share of the z-scored sample's variance that the components keep.
        sampled: rows it was fitted on.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    components: NDArray[np.float32]
    explained_variance: float
    sampled: int

    @classmethod
    def fit(cls, states: NDArray[np.float32], dims: int) -> Normalizer:
        """Fit mean and deviation, then PCA by eigendecomposition of the covariance.

        The covariance is summed up over chunks, so that memory holds d² numbers and one chunk, whatever n.

        Args:
            states: float32[n, d]; may be memory-mapped.
            dims: components kept, at most min(n, d).
        """
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler()
        for start in range(0, len(states), _CHUNK):
            scaler.partial_fit(states[start : start + _CHUNK].astype(np.float64))
        mean = scaler.mean_.astype(np.float32)
        scale = (1.0 / np.sqrt(scaler.var_ + _EPSILON)).astype(np.float32)
        gram = np.zeros((len(mean), len(mean)))
        for start in range(0, len(states), _CHUNK):
            # Centred to within float32's rounding of the mean, which is all that PCA asks for.
            scored = (states[start : start + _CHUNK] - mean) * scale
            gram += scored.T @ scored
        variances, vectors = np.linalg.eigh(gram)
        components = np.ascontiguousarray(vectors[:, ::-1][:, :dims].T, np.float32)
        kept = round(float(variances[-dims:].sum() / max(variances.sum(), _EPSILON)), 4)
        return cls(mean, scale, components, kept, len(states))

    def keys(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32[n, d] hidden states → float32[n, dims] keys of unit length (Eq. 1 and 2)."""
        reduced = ((states - self.mean) * self.scale) @ self.components.T
        length = np.linalg.norm(reduced, axis=1, keepdims=True)
        return np.asarray(reduced / np.maximum(length, _EPSILON), np.float32)

    def key(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32[d] → float32[dims]: the same for one state.

        Raises:
            CorruptStore: it has another length than those that this was fitted on.
        """
        if state.shape != self.mean.shape:
            raise CorruptStore(
                f"a hidden state has {len(state):,} numbers, and the dense index was built of {len(self.mean):,}",
                "run `specds build-dense --replace`",
            )
        key: NDArray[np.float32] = _key(self.mean, self.scale, self.components, state)
        # A state that is not finite has no neighbours, and an ANN library may end the process that asks for them.
        return key if np.isfinite(key).all() else np.zeros_like(key)

    def same(self, other: Normalizer) -> bool:
        """Whether keys of both can be compared: they are the same transformation."""
        return self is other or (
            np.array_equal(self.components, other.components)
            and np.array_equal(self.mean, other.mean)
            and np.array_equal(self.scale, other.scale)
        )

    def save(self, path: Path, below: Path | None = None) -> None:
        """Write it as a new safetensors file. Raises: as `files.create`."""
        from safetensors.numpy import save

        about = {"explained_variance": str(self.explained_variance), "sampled": str(self.sampled)}
        arrays = {"mean": self.mean, "scale": self.scale, "components": self.components}
        with create(path, below) as file:
            file.write(save(arrays, metadata=about))

    @classmethod
    def load(cls, path: Path) -> Normalizer:
        """Read what `save` wrote.

        Raises:
            ValueError: the arrays are missing, their shapes do not fit each other, or no fit gives such numbers.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                mean, scale, components = (file.get_tensor(name) for name in ("mean", "scale", "components"))
                about = file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {error}") from error
        if any(array.dtype != np.float32 for array in (mean, scale, components)):
            raise ValueError(f"{path.name}: {mean.dtype}, {scale.dtype} and {components.dtype}, not float32")
        if mean.shape != scale.shape or mean.ndim != 1 or components.shape[1:] != mean.shape:
            raise ValueError(f"{path.name}: shapes {mean.shape}, {scale.shape} and {components.shape} do not fit")
        for name, numbers, most in (
            ("mean", mean, _MOST_MEAN),
            ("scale", scale, _MOST_SCALE),
            ("components", components, _MOST_COMPONENT),
        ):
            if not (np.abs(numbers) <= most).all():  # false for NaN, too
                raise ValueError(f"{path.name}: its {name} go beyond {most:g}")
        kept, sampled = float(about.get("explained_variance", "nan")), int(about.get("sampled", "0"))
        return cls(mean, scale, components, kept, sampled)


@compiled_loosely
def _key(mean: Any, scale: Any, components: Any, state: Any) -> Any:
    """A hidden state as a key, float32[dims] of length 1.

    mean, scale, state: float32[hidden]; components: float32[dims, hidden].
    """
    scored = np.empty(len(state), np.float32)
    for at in range(len(state)):
        scored[at] = (state[at] - mean[at]) * scale[at]
    key = np.empty(len(components), np.float32)
    square = np.float32(0.0)
    for row in range(len(components)):
        total = np.float32(0.0)
        for at in range(len(scored)):
            total += components[row, at] * scored[at]
        key[row] = total
        square += total * total
    length = max(np.sqrt(square), np.float32(_EPSILON))
    for row in range(len(key)):
        key[row] /= length
    return key
