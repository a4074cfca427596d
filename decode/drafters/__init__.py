"""Drafters by name. A new one is a file here and a line below."""

from __future__ import annotations

DRAFTERS = {
    "auto": "specds.decode.auto.drafter:Auto",
    "none": "specds.decode.drafters.none:Null",
    "pld": "specds.decode.drafters.pld:PromptLookup",
    "pld-plus": "specds.decode.drafters.pld_plus:PldPlus",
    "adapld": "specds.decode.drafters.adapld:AdaPld",
    "recycling": "specds.decode.drafters.recycling:Recycling",
    "logitspec": "specds.decode.drafters.logitspec:LogitSpec",
    "sam": "specds.decode.drafters.sam:Sam",
    "respec": "specds.decode.drafters.respec:ReSpec",
    "model": "specds.decode.drafters.model:ModelDrafter",
    "rest": "specds.decode.drafters.rest:Rest",
    "dresd": "specds.decode.drafters.dresd:Dresd",
}
