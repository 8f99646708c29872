"""A small part of the fuzzers' cases, the same ones every time: each works or is one clear line.

Many more: `python benchmarks/campaign.py --kinds fuzz_config:20000 fuzz_prompts:20000 fuzz_folders:2000`.
"""

import pytest

pytest.importorskip("torch")
from faults import fuzz_config, fuzz_folders, fuzz_prompts

SEED = 20


@pytest.mark.parametrize(
    ("campaign", "count"),
    [(fuzz_config.campaign, 300), (fuzz_prompts.campaign, 1600), (fuzz_folders.campaign, 100)],
    ids=["config", "prompts", "folders"],
)
def test_every_case_works_or_is_one_line(campaign, count, tmp_path):
    outcomes = list(campaign(tmp_path, SEED, count))
    assert len(outcomes) == count
    broken = [f"{outcome.case}: {outcome.note}" for outcome in outcomes if not outcome.handled]
    assert not broken, "\n".join(broken[:10])
