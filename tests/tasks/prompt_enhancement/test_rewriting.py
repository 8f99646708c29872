"""How a policy's answer becomes the prompt that is drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.tasks.rewriting import parse_rewrite


@pytest.mark.parametrize(
    ("written", "prompt"),
    [
        ("a fox in snow", "a fox in snow"),
        ("  a   fox\tin snow \n", "a fox in snow"),
        ("<think>\nlet me see\n</think>\n\na fox", "a fox"),
        ("let me see</think>a fox", "a fox"),
        ('"a fox, snow."', "a fox, snow."),
        ("“a fox”", "a fox"),
        ('"a fox".', "a fox."),
        ('"a fox in', "a fox in"),
        ("'a dog's life'", "a dog's life"),
        ("'a dog' and 'a cat'", "'a dog' and 'a cat'"),
        ('"Hello" sign on a wall', '"Hello" sign on a wall'),
        ("a fox, 'sharp'", "a fox, 'sharp'"),
        ("Prompt: a fox", "a fox"),
        ("Enhanced prompt: Prompt: a fox", "a fox"),
        ("**Improved Prompt:** a fox", "a fox"),
        ("**Final prompt:**\n\na fox", "a fox"),
        ('Sure! Here is the rewritten prompt:\n\n"a fox"\n\nThis adds detail.', "a fox"),
        ("Here is a fox in snow", "Here is a fox in snow"),
        ("1. a fox\n2. a dog", "a fox"),
        ("- a fox", "a fox"),
        ("3 foxes", "3 foxes"),
        ("```\na fox\n```", "a fox"),
        ("...\na fox", "a fox"),
        ("狐", "狐"),
    ],
)
def test_rewrites_are_read(written, prompt):
    assert parse_rewrite(written, "rewrite", "the user's") == (prompt, True)


@pytest.mark.parametrize(
    "written",
    [
        "",
        " \n",
        '""',
        "...!",
        "<think>a fox is",
        "Here is the prompt:",
        "Prompt:",
        "I'm sorry, but no",
        "As an AI language model I",
        "I cannot",
        "```",
    ],
)
def test_unusable_rewrites_leave_the_prompt_unchanged(written):
    assert parse_rewrite(written, "rewrite", "the user's") == ("the user's", False)


@given(st.text(alphabet=st.sampled_from("a1 \n\"'`“”*:.-#>Prompt<think>/ü"), max_size=40))
def test_a_usable_rewrite_is_one_line_with_words(written):
    rewrite = parse_rewrite(written, "rewrite", "P!")
    if not rewrite.usable:
        assert rewrite.text == "P!"
    else:
        assert "\n" not in rewrite.text and rewrite.text == rewrite.text.strip()
        assert any(c.isalnum() for c in rewrite.text)


def test_append_is_the_prompt_and_the_first_line_of_its_continuation():
    assert parse_rewrite(", in snow\nNext", "append", "a fox") == ("a fox, in snow", True)
    assert parse_rewrite("es in snow", "append", "a fox") == ("a foxes in snow", True)
    for nothing in ("", " .", "\nin snow"):
        assert parse_rewrite(nothing, "append", "a fox") == ("a fox", False)
