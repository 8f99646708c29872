"""The fields of a vision tower in config.json: each is honoured or refused by name."""

import pytest

from grpo_jax.models.architectures import read_model_config
from grpo_jax.models.vision.config import VisionConfig

TEXT = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TOKENS = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
COMMON = dict(depth=3, num_heads=2, in_chans=3, patch_size=14, spatial_patch_size=14, spatial_merge_size=2)
# The fields of the hub's folders of each architecture, made small.
TOWERS = {
    "qwen2_vl": COMMON | dict(embed_dim=16, hidden_size=32, mlp_ratio=4, temporal_patch_size=2),
    "qwen2_5_vl": COMMON
    | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24, window_size=112, hidden_act="silu")
    | dict(fullatt_block_indexes=[1, 7], tokens_per_second=2, temporal_patch_size=2),
    "qwen3_vl": dict(depth=3, num_heads=2, in_channels=3, patch_size=16, hidden_act="gelu_pytorch_tanh")
    | dict(hidden_size=16, out_hidden_size=32, intermediate_size=24, num_position_embeddings=50)
    | dict(deepstack_visual_indexes=[0, 2], model_type="qwen3_vl", initializer_range=0.01),
}


def fields(architecture: str, **changes) -> dict:
    return TEXT | TOKENS | dict(model_type=architecture, vision_config=TOWERS[architecture] | changes)


def read(architecture: str, **changes) -> VisionConfig:
    vision = read_model_config(fields(architecture, **changes)).vision
    assert vision is not None
    return vision


def test_what_a_folder_does_not_say_is_as_transformers_has_it():
    transformers = pytest.importorskip("transformers")
    classes = {
        "qwen2_vl": transformers.Qwen2VLConfig,
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
        "qwen3_vl": transformers.Qwen3VLConfig,
    }
    for architecture, made in classes.items():
        whole = made(text_config=dict(hidden_size=3584)).to_dict()
        bare = {name: value for name, value in whole.items() if not name.endswith("token_id")} | dict(vision_config={})
        assert read_model_config(whole) == read_model_config(bare), architecture


def test_every_field_that_changes_the_tower_is_honoured():
    changes = dict(depth=4, num_heads=4, spatial_merge_size=1, temporal_patch_size=1, initializer_range=0.5)
    changes |= dict(
        in_channels=1, patch_size=7, hidden_act="relu", rope_theta=5.0, rope_parameters=dict(rope_theta=5.0)
    )
    own = dict(
        qwen2_vl=dict(embed_dim=32, mlp_ratio=2.5),
        qwen2_5_vl=dict(hidden_size=32, intermediate_size=8, window_size=56, fullatt_block_indexes=[0]),
        qwen3_vl=dict(hidden_size=32, intermediate_size=8, num_position_embeddings=9, deepstack_visual_indexes=[1]),
    )
    repeated = {"in_channels": "in_chans", "patch_size": "spatial_patch_size"}
    for architecture in TOWERS:
        for name, value in (changes | own[architecture]).items():
            also = {repeated[name]: value} if name in repeated and repeated[name] in TOWERS[architecture] else {}
            assert read(architecture, **{name: value}, **also) != read(architecture), (architecture, name)
    for name in TOKENS:
        assert read_model_config(fields("qwen2_vl") | {name: 5}).vision != read("qwen2_vl"), name


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "qwen2_vl",
            dict(window_size=112),
            "vision_config: window_size=112 is not supported for model_type 'qwen2_vl'",
        ),
        ("qwen2_vl", dict(hidden_size=16), "vision_config.hidden_size: expected the .* hidden_size=32, got 16"),
        ("qwen2_vl", dict(num_heads=3), "num_heads: expected a divisor of the width"),
        ("qwen2_vl", dict(hidden_act="swoosh"), "vision_config.hidden_act: expected one of .*swoosh"),
        ("qwen2_vl", dict(model_type="siglip"), "model_type='siglip'"),
        ("qwen2_vl", dict(rope_parameters=dict(rope_type="yarn")), "rope_type: .* got 'yarn'"),
        ("qwen2_vl", dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor=0.5"),
        ("qwen2_vl", dict(depth=2**40), "depth: expected at most 4096"),
        ("qwen3_vl", dict(intermediate_size=8.5), "inner\n.* valid integer"),
        ("qwen2_5_vl", dict(window_size=20), "window_size: expected a merged token or more, got 20"),
        (
            "qwen3_vl",
            dict(deepstack_visual_indexes=[0, 3]),
            "deepstack_visual_indexes: expected ascending .* of 3 layers",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_fields_are_refused_by_name(architecture, changes, message):
    with pytest.raises(ValueError, match=message):
        read(architecture, **changes)


def test_a_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="image_token_id: expected a token of the vocabulary of 64, got 64"):
        read_model_config(fields("qwen2_vl") | dict(image_token_id=64))
