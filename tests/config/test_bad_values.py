"""Errors in a config: one line with the field, the expected value and the given one, or the nearest name."""

import json
import re
import shlex

import pytest
import yaml
from support import taught_task
from support.text_task import ROOT

from grpo_jax.config.command_line import parse
from grpo_jax.config.other_names import ALL_NAMES
from grpo_jax.config.run import make_config
from grpo_jax.config.sections import LoraSection, SamplingSection, TrainingSection
from grpo_jax.errors import UserError
from grpo_jax.train import main

COUNTDOWN = f"{ROOT}/examples/own_task/task.py"
TABLE = f"""
# every kind of bound, and types
--seed=-1 | seed: expected a number in [0, 2^63), got -1
--data.held_out=0.7 | data.held_out: expected a number < 0.5, got '0.7'
--sampling.top_p=0 | sampling.top_p: expected a number > 0, got '0'
--algorithm.clip_low=2 | algorithm.clip_low: expected a number <= 1, got '2'
--ppo.gae_lambda=nan | ppo.gae_lambda: expected a finite number
--training.max_hours=1:30 | training.max_hours: expected a number, got '1:30'
--training.max_steps=yes | training.max_steps: expected a whole number, got 'yes'
--training.max_steps=2.5 | training.max_steps: expected a whole number, got '2.5'
--policy.matmul_precision=half | policy.matmul_precision: expected 'default', 'high', 'highest' or 'bfloat16', got
--policy.lora.vision=2 | policy.lora.vision: expected true or false, got '2'
--policy.lora=3 | policy.lora: expected a mapping, got '3'
--rewards=[0.5] | rewards[0]: expected a name, or a mapping of name and weight; a function goes to run(config, r
--algorithm.advantage=gdop | (did you mean gdpo?), got 'gdop'
--algorithm.preset=gpro | (did you mean grpo?), got 'gpro'
--task={COUNTDOWN}:Countdown --task.largest=2 | task.largest: expected a number >= 3, got 2
--task=prompt_enhancement --task.invalid=free | task.invalid: expected
# fields that are not there: the nearest, another library's, one that left
--optimiser.beta2=.5 | optimiser: no such field; did you mean optimizer?
--lora.rank=8 | lora: no such field; did you mean policy.lora?
--rewards='[{{name: m:f, wieght: 1}}]' | rewards[0].wieght: no such field; did you mean rewards[0].weight?
--devices.polcy=cpu | devices: expected names of policy, got ['polcy']
--task=recommendation --task.retrieval.bakend=a | task.retrieval.bakend: no such field; did you mean task.retrieval.back
--task=prompt_enhancement --judges.scorer.modl=x | judges.scorer.modl: no such field; did you mean judges.scorer.model
--training.beta=.1 | training.beta: no such field; here it is algorithm.kl_coef; by default 0
--sampling.learning_rate=1 | sampling.learning_rate: no such field; here it is optimizer.learning_rate
--gradient_checkpointing=true | gradient_checkpointing: no such field; here it is policy.remat: layer
--use_vllm=true | use_vllm: no such field; it is not here: the sampler is compiled with the policy
--rollout.n=4 | rollout.n: no such field; here it is sampling.group_size
--actor_rollout_ref.actor.optim.lr=1e-6 | actor_rollout_ref.actor.optim.lr: no such field; here it is optimizer.learning
--actor_rollout_ref.actor.mistake=1 | actor_rollout_ref: no such field; it is not here: its fields are in policy, sam
--advantage_estimator=rloo | advantage_estimator: no such field; here it is algorithm.advantage; gdpo, grpo, rloo, gae
--n_samples_per_prompt=4 | n_samples_per_prompt: no such field; here it is sampling.group_size
--zero_stage=3 | zero_stage: no such field; here it is policy.mesh.fsdp; the number of devices
--policy.device=gpu:0 | policy.device: no such field; here it is devices; as in devices.policy gpu:0
--data.shuffle=true | data.shuffle: no such field; it is not here: the order of training rows is always drawn from seed
--data.streaming=true | data.streaming: no such field; it was removed: data files
--task=prompt_enhancement --judges.renderer.scheduler=x | judges.renderer.scheduler: no such field; it was removed
--config=prompt_enhancement_sdxl | no such file; did you mean prompt_enhancement_sdxl_turbo?
--config=recommendation_slates | no such file; it was removed: use recommendation_quick
--judges.a=open_clip --judges.a.pool.batch_attempts=2 | judges.a.pool.batch_attempts: no such field; it is a constant
--judges.a=open_clip --judges.a.pool.in_flight=2 | judges.a.pool.in_flight: no such field; it was removed: an actor has
# options
--seed | --seed: expected a value
train | train: expected an option, such as --config FILE
algorithm.adv_estimator=grpo | algorithm.adv_estimator: expected an option; here it is algorithm.advantage; gdpo, grpo
sampling.group_size=4 | sampling.group_size: expected an option; write --sampling.group_size VALUE
--rewards='[{{' | rewards: not valid YAML
--resum | --resum: no such option; did you mean --resume?
--plam --seed=1 | --plam: no such option; did you mean --plan?
--eval_rewards={"[" * 1200} | eval_rewards: nested deeper than 32 levels
--{"a." * 3000}b 1 | expected an option
--data.prompts=\udcff.txt | data.prompts: expected a string
--config={"x" * 5000} | no such file; configs that ship with grpo_jax
--training.max_steps={"9" * 5000} | training.max_steps:
# tasks and judges
--task=prompt_recreation | task: no such kind, got 'prompt_recreation'; it was removed: use prompt_refinement
--task=txt | task: no such kind, got 'txt'; did you mean text? (your own: file.py:Class)
--task=nowhere.py:Mine | task: the file nowhere.py does not exist
--task={COUNTDOWN}:Countdow | has no task or judge called Countdow (it has: Calculator, Countdown)
--task={taught_task.__file__}:Taught | task.texts: expected a value, it has no default
--judges.a.model=x | judges.a: expected a kind
--judges.a=clip | judges.a: no such kind, got 'clip'; did you mean open_clip
--judges.policy=open_clip | judges: expected another name: policy is the policy's
--judges.a=open_clip --judges.a.pool.replicas=-1 | judges.a.pool.replicas: expected a number >= 1, got '-1'
--judges.a=open_clip --judges.a.pool.address=auto | judges.a.pool.address: expected HOST:PORT of a Ray cluster, or null
--judges.a=vqa --judges.a.path=x '--judges.a.question=Is it?' | judges.a.question: expected a text with {{prompt}} in it
# fields that do not go together
--policy.lora.path=a --policy.lora.rank=2 | policy.lora.path: expected no rank, alpha or targets beside
--policy.new.width=20 --policy.new.heads=8 | policy.new.heads: expected a number that divides width = 20
--policy.mesh.fsdp=5 | policy.mesh.fsdp: expected a divisor of 12, the prompts of one micro-
--policy.quantised=int8 | policy.quantised: expected none without policy.lora
--policy.quantised=int8 --policy.lora.rank=2 --policy.mesh.fsdp=2 | policy.quantised: expected none without policy.lora
--policy.lora.vision=true | policy.lora.vision: expected false without adapters
--policy.lora.rank=2 --policy.lora.vision=true --policy.vision=train | policy.vision: expected frozen beside policy.lora
--sampling.group_size=1 | sampling.group_size: expected at least 2 (a group is compared), got 1
--sampling.sampling_mask=keep | sampling.sampling_mask: expected none without a top_k
--sampling.turns=2 --data.form=append | sampling.turns: expected 1 with data.form append, which continues the prompt
--data.tools=[a.py:add] | sampling.turns: expected at least 2 with tools that are called
--data.tools=[a.py:add] --sampling.turns=2 --task.environment=a.py:b | task.environment: expected nothing with data.too
--task=prompt_enhancement --data.tools=[a.py:add] --sampling.turns=2 | data.tools: expected JSON schemas with this task
--data.form=append '--data.tools=[{{type: function, function: {{name: sit}}}}]' | data.tools: expected nothing with form
--data.chat_template_options.today=soon | chat_template_options.today: expected "YYYY-MM-DD", got 'soon'
--task=prompt_refinement --sampling.turns=1 | sampling.turns: expected at least 2, to see its picture, got 1
--task=environment --task.environment=a.py:A --data.prompts=a.jsonl | data.prompts: expected nothing
--task=environment --task.environment=a.py:A --data.test=a.jsonl | data.test: expected nothing
--task=prompt_enhancement --data.prompts=builtin --eval_rewards=[pixel_accuracy] | expected the prompts it knows
--algorithm.turn_advantage=return --algorithm.advantage=gae | algorithm.turn_advantage: expected 'last' with advantage
--algorithm.scale=batch | algorithm.scale: expected null with advantage 'gdpo'
--algorithm.advantage=gae --algorithm.zero_variance_groups=drop | algorithm.zero_variance_groups: expected 'keep' with
--algorithm.importance_cap=.5 | algorithm.importance_cap: expected null, 0 or a number >= 1, got 0.5
--algorithm.teacher=folder | algorithm.teacher: expected none with advantage 'gdpo' and kl_coef 0, which do not read it
--algorithm.advantage=gae --algorithm.teacher=a | algorithm.teacher: expected none with advantage 'gae' and no KL
--algorithm.advantage=opd --algorithm.teacher=a --algorithm.update_ref_every=1 | algorithm.update_ref_every: expected 0
--algorithm.surrogate.dual=.5 | algorithm.surrogate.dual: expected a number > 1, got '.5'
--algorithm.surrogate.delta=5 | algorithm.surrogate.delta: no such field; here it is algorithm.surrogate.dual
--algorithm.preset=cispo --algorithm.surrogate.dual=3 | algorithm.surrogate: expected cap with preset 'cispo', got ['dua
--algorithm.preset=drpo --algorithm.clip_high=.1 | algorithm.clip_high: expected null with preset 'drpo'
--algorithm.advantage=max_at_k --algorithm.best_of=9 | algorithm.best_of: expected 2 to sampling.group_size
--algorithm.advantage=optimal_token_baseline --algorithm.scale=none | algorithm.scale: expected null with advantage 'opt
--algorithm.advantage=optimal_token_baseline --sampling.group_size=1 | sampling.group_size: expected at least 2 (a group
--algorithm.advantage=maxrl --algorithm.overlong_buffer=2 | algorithm.overlong_buffer: expected 0 with advantage 'maxrl'
--algorithm.overlong_buffer=129 | algorithm.overlong_buffer: expected at most sampling.max_new_tokens = 128
--training.minibatches=5 | training.prompts_per_batch: expected a multiple of minibatches x grad_accumulation_steps = 5
--training.grad_dtype=float16 | training.grad_dtype: expected 'float32' or 'bfloat16' (did you mean bfloat16?)
--training.grad_dtype=bfloat16 --policy.lora.rank=2 | training.grad_dtype: expected float32 with policy.lora, whose ad
--training.chunk_prompts=5 | training.chunk_prompts: expected a divisor of prompts_per_batch = 12
--rewards='[{{name: ""}}]' | rewards[0].name: expected a name, got ''
--rewards='[{{name: m:a, weight: -1}}]' --evaluation.best_by=a | a measure to raise, and not a reward of negative weight
--rewards='[{{name: m:a, condition_on: b}}, {{name: m:b, condition_on: a}}]' | a chain that ends, got 'a → b → a'
"""
ROWS = [line.split(" | ") for line in TABLE.splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize(("words", "message"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_mistake_is_one_line(words, message, capsys):
    words = shlex.split(words)
    given = any(word.startswith(("--task=", "--config=")) for word in words)
    assert main(words if given else ["--task=text", *words]) == 2
    line = capsys.readouterr().err
    assert message in line and line.startswith("error: ") and line.count("\n") == 1 and len(line) < 300


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("training.max_step", 3, "training.max_step: no such field; did you mean training.max_steps?"),
        ("num_generations", 4, "num_generations: no such field; here it is sampling.group_size"),
        ("sampling.top_p", 2.0, "sampling.top_p: expected a number <= 1, got "),
        (
            "rewards",
            [{"name": "m:f", "weight": True}],
            "rewards[0].weight: expected a number, got True (YAML reads yes",
        ),
        ("rewards", [{"name": "m:f", "threshold": "no"}], "rewards[0].threshold: expected a number, got 'no'"),
    ],
)
def test_a_file_an_argument_and_python_are_told_the_same(name, value, message, tmp_path):
    values = value
    for part in reversed(name.split(".")):
        values = {part: values}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"task": "text", **values}))
    for way in (
        lambda: parse([f"--config={tmp_path / 'c.yaml'}"]),
        lambda: parse(["--task=text", f"--{name}={json.dumps(value)}"]),
        lambda: make_config(values, task="text"),
    ):
        with pytest.raises(UserError) as raised:
            way()
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {max_hours: 1:30}", "training.max_hours: expected a number, got '1:30'"),
        (
            "optimizer: {learning_rate: on}",
            "optimizer.learning_rate: expected a number, got True (YAML reads yes and on",
        ),
        ("training: {max_steps: yes}", "training.max_steps: expected a number, got True"),
        ("data: {forbidden_tokens: [3, no]}", "data.forbidden_tokens: expected a number, got [3, False]"),
    ],
)
def test_booleans_and_times_of_yaml_are_no_numbers(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(f"task: text\n{text}\n")
    with pytest.raises(UserError, match=re.escape(message)):
        parse([f"--config={tmp_path / 'c.yaml'}"])
    (tmp_path / "c.yaml").write_text("task: text\ntraining: {max_steps: 010, max_hours: 1.5e0}\nresume: on\n")
    config = parse([f"--config={tmp_path / 'c.yaml'}"])
    assert (config.training.max_steps, config.training.max_hours, config.resume) == (10, 1.5, True)


def test_ranges_hold_for_sections_of_python_too():
    with pytest.raises(UserError, match=r"TrainingSection.max_steps: expected a number, got True"):
        TrainingSection(max_steps=True)
    with pytest.raises(UserError, match=r"SamplingSection.top_p: expected a number <= 1, got 2"):
        SamplingSection(top_p=2.0)
    with pytest.raises(UserError, match=r"LoraSection.rank: expected a whole number, got 2.5"):
        LoraSection(rank=2.5)
    with pytest.raises(UserError, match=r"task: expected a kind \(environment, .*, text, file.py:Class\), got None"):
        make_config({})


@pytest.mark.parametrize("advantage", ["gae", "batch"])
def test_a_group_of_one_will_do_without_group_statistics(advantage):
    config = make_config(task="text", sampling={"group_size": 1}, algorithm={"advantage": advantage})
    assert config.sampling.group_size == 1


OLDER = (
    "num_sample_generations num_rollouts k reward_type use_dummy dummy_size normalize_rewards fp16 bf16 use_ref_model "
    "clip_ratio gamma grpo_epochs checkpoint_dir update_ref_model_freq prompt_file sequential_file policy_model "
    "dataset_name max_length kl_coef"
)


@pytest.mark.parametrize("value", [[], ["3"]], ids=["alone", "with a value"])
def test_an_older_scripts_option_is_told_its_field(value, capsys):
    for name in OLDER.split():
        assert main(["--task=recommendation", f"--{name}", *value]) == 2
        line = capsys.readouterr().err
        assert f"{name}: no such " in line and f"; here it is {ALL_NAMES[name]}" in line
