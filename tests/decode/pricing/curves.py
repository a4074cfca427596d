"""Cost curves of several kinds of machine."""

from __future__ import annotations

import numpy as np

from specds.decode.pricing.curve import CostCurve

# A row costs a tenth of a pass, as on a CPU; next to nothing, as on a GPU; or the second one as much as the first.
FAIR = CostCurve((1, 65), (100,), np.array([[1.0, 7.4]]))


FREE = CostCurve((1, 65), (100,), np.array([[1.0, 1.01]]))


STEEP = CostCurve((1, 2, 65), (100,), np.array([[1.0, 2.0, 5.0]]))
