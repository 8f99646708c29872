"""Write the tables of docs/coming_from_trl.md from those of `grpo_jax/config/other_names.yaml`.

.venv/bin/python docs/make_trl_page.py
"""

import re
from collections.abc import Mapping
from pathlib import Path

from grpo_jax.config import other_names

PAGE = Path(__file__).parent / "coming_from_trl.md"
HEAD = "| there | here |\n|---|---|\n"
TITLES = {
    "## Every argument of `GRPOTrainer`": other_names.TABLES["trainer"],
    "## Every field of `GRPOConfig`": other_names.TABLES["grpo_config"],
    "## Fields of transformers' `TrainingArguments`": other_names.TABLES["training_arguments"],
    "## Options of TRL's command line": other_names.TABLES["command"],
    "## Options of verl": other_names.TABLES["verl"],
    "## Options of OpenRLHF": other_names.TABLES["openrlhf"],
    "## Options of older GRPO scripts": other_names.TABLES["older_scripts"],
    "## Metrics of older scripts": other_names.TABLES["metrics"],
}


def rows(table: Mapping[str, str]) -> str:
    """Return a table's lines: fields as code. The names without a place share the last line."""
    absent = [names for names, text in table.items() if text.startswith(other_names.NOT_HERE)]
    lines = [f"| {names} | {_here(text)} |\n" for names, text in table.items() if names not in absent]
    return "".join([*lines, f"| {', '.join(absent)} | not here |\n"] if absent else lines)


def with_tables(page: str) -> str:
    """Return the page with the current tables, each after its title."""
    for title, table in TITLES.items():
        start = page.index(HEAD, page.index(title)) + len(HEAD)
        end = re.compile(r"^(?!\|)", re.MULTILINE).search(page, start).start()
        page = page[:start] + rows(table) + page[end:]
    return page


def _here(text: str) -> str:
    """Return the fields of an entry as code, without the difference, which is for error messages."""
    return ", ".join(f"`{field}`" for field in text.partition("; ")[0].split(", "))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
