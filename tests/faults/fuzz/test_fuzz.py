"""A small part of the fuzzers' cases, the same ones every time: each works or is one clear line.

Many more: `python benchmarks/campaign.py --kinds fuzz.config:20000`.
"""

import pytest

pytest.importorskip("torch")
from faults.fuzz import config, folders, prompts

SEED = 20


@pytest.mark.parametrize(
    ("campaign", "count"),
    [(config.campaign, 100), (prompts.campaign, 200), (folders.campaign, 20)],
    ids=["config", "prompts", "folders"],
)
def test_every_case_works_or_is_one_line(campaign, count, tmp_path):
    outcomes = list(campaign(tmp_path, SEED, count))
    assert len(outcomes) == count
    broken = [f"{outcome.case}: {outcome.note}" for outcome in outcomes if not outcome.handled]
    assert not broken, "\n".join(broken[:10])
