"""--plan counts whole episodes: every turn, and what stands between them."""

from support.tiny_decoders import QWEN2_FIELDS

from grpo_jax.config.run import make_config
from grpo_jax.models import hf
from grpo_jax.planning import memory as plan
from grpo_jax.planning.programs import Report, Work

PROMPTS, GROUP, STEPS, ANSWER, TURNS = 4, 3, 6, 11, 2


def configured(**training):
    values = {"group_size": GROUP, "max_new_tokens": STEPS, "turns": TURNS, "max_observation_tokens": ANSWER}
    config = make_config(
        task={"kind": "text", "environment": "mine.py:step"},
        data={"max_prompt_tokens": 16},
        sampling=values,
        training={"prompts_per_batch": PROMPTS, **training},
        algorithm={"turn_advantage": "return"},
        rewards=[{"name": "mine.py:reward"}],
    )
    return config, hf.model_config("tiny", QWEN2_FIELDS)


def test_a_plan_compiles_the_last_turn_too(monkeypatch):
    """It asks the sampler's own program, as a run makes it."""
    config, model = configured()
    asked = []

    def counted(program, *_):
        asked.append(program.function.lower(*program.arguments).as_text().count("while"))
        return Report(0, 2**20 * len(asked), 0, Work())

    monkeypatch.setattr(plan, "report_program", counted)
    memory, programs = plan.plan_policy(config, model)
    assert "turn" in programs and len(asked) == len(programs) and memory.sampling >= 2 * 2**20
