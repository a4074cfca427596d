"""The sources and their features."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np

from specds.decode.auto.acceptance import shipped
from specds.decode.auto.features import AGREEMENT, DEPTH, FEATURES, ORIGINS, SOURCES, columns
from specds.decode.auto.probability import log_odds


def test_sources_of_nodes_say_whether_they_were_copied() -> None:
    names = {origin.name: origin.retrieved for origin in ORIGINS}
    assert len(names) == 1 << len(SOURCES) == 128
    assert names["context"]
    assert names["context+recycling"]
    assert names["suffix"]
    assert names["dense"]
    assert not names["recycling"]
    assert not names["recycling+alternatives"]
    assert not names["model"]


def test_features_have_names_and_the_shipped_model_reads_them() -> None:
    ensemble = shipped().ensemble
    row = np.full(len(FEATURES), -1.0, np.float32)
    low = log_odds(ensemble, row)
    row[FEATURES.index("context order")] = row[FEATURES.index("context own order")] = 16
    row[FEATURES.index("context share")] = 0.95
    row[FEATURES.index("context count")] = 20
    row[FEATURES.index("context recent")] = row[FEATURES.index("agreement")] = 1
    row[FEATURES.index("recycling order")] = 3
    row[FEATURES.index("recycling rank")] = row[FEATURES.index("recycling gap")] = 0
    row[FEATURES.index("recycling lead")] = 8
    assert log_odds(ensemble, row) > max(low, 1.5)


def test_every_feature_is_of_one_source_or_of_every_node() -> None:
    own = [column for source in range(len(SOURCES)) for column in columns(source)]
    assert own == list(range(DEPTH + 3, AGREEMENT))
    assert len(set(FEATURES)) == len(FEATURES) == AGREEMENT + 1


def test_features_stand_in_files_by_these_names() -> None:
    """Calibrations of other versions name them."""
    kept = json.loads(files("specds.decode.auto").joinpath("acceptance.json").read_text())["features"]
    assert kept == list(FEATURES)
