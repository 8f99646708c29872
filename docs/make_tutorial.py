"""Make the pages of the tutorial: run the cells of docs/tutorial/N_name.py and write docs/tutorial/N_name.md.

pip install -e ".[cartpole,figures]"
python docs/make_tutorial.py                 # every page, minutes on two cores
python docs/make_tutorial.py 4_grpo          # one of them

A cell's output is below it. Its figures go to docs/images/tutorial, with their labels as link texts. The
files are notebooks in jupytext's percent format: `# %%` begins a cell, `# %% [markdown]` one of text.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAGES = sorted((HERE / "tutorial").glob("[0-9]_*.py"))
IMAGES = HERE / "images" / "tutorial"
CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)
# Okabe and Ito's colours, which colour-blind readers can tell apart, on white, which can be read on any ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
STYLE = {
    **{"font.size": 10, "axes.titlesize": 10.5, "axes.spines.top": False, "axes.spines.right": False},
    **{"lines.linewidth": 1.8, "legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 110},
    "axes.prop_cycle": f"cycler(color={COLOURS})",
}


class Cell(NamedTuple):
    """A cell of a page.

    Attributes:
        source: Markdown, or Python.
        is_text: Whether it is Markdown.
        line: Of the file, on which the source begins; from 0.
        tags: Text after `# %%`, such as `tags=["learned"]`.
    """

    source: str
    is_text: bool
    line: int
    tags: str


class Outcome(NamedTuple):
    """The output of a code cell, and the labels of its figures."""

    printed: str
    figures: list[str]


def read_cells(text: str) -> list[Cell]:
    """The cells of a file in the percent format."""
    heads = list(CELL.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    cells = []
    for head, end in zip(heads, ends, strict=True):
        body, is_text = text[head.end() : end], "[markdown]" in head[1]
        source = body.strip("\n")
        begins = head.end() + len(body) - len(body.lstrip("\n"))
        if is_text:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        cells.append(Cell(source, is_text, text[:begins].count("\n"), head[1].strip()))
    return cells


def run_cells(path: Path, cells: list[Cell], images: Path | None = None) -> list[Outcome]:
    """Runs the cells of code one after the other, in one namespace; saves what they draw if told where."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    namespace: dict[str, Any] = {"__name__": path.stem}
    outcomes, number = [], 0
    with plt.rc_context(STYLE):
        for cell in cells:
            printed, labels = io.StringIO(), []
            if not cell.is_text:
                code = compile("\n" * cell.line + cell.source, path, "exec")  # tracebacks name the file's lines
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)
            for figure in map(plt.figure, plt.get_fignums()):
                number += 1
                labels.append(str(figure.get_label()))
                if images:
                    save(figure, images / f"{path.stem}_{number}.png")
                plt.close(figure)
            outcomes.append(Outcome(printed.getvalue(), labels))
    return outcomes


def save(figure: Figure, target: Path) -> None:
    """A picture of 128 colours: a third of the size, and nobody sees the difference."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(128).save(target, optimize=True)


def write_page(path: Path, cells: list[Cell], outcomes: list[Outcome]) -> str:
    """The page in Markdown."""
    parts, number = [], 0
    for cell, outcome in zip(cells, outcomes, strict=True):
        parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
        if outcome.printed:
            parts.append(f"```text\n{outcome.printed.rstrip()}\n```")
        for label in outcome.figures:
            number += 1
            parts.append(f"![{label}](../images/tutorial/{path.stem}_{number}.png)")
    return "\n\n".join([*parts, _ways_on(path)]) + "\n"


def _ways_on(path: Path) -> str:
    """Return the links to other pages."""
    place, names = PAGES.index(path), [page.stem for page in PAGES]
    ways = [f"[contents](index.md) · this page as code: [`{path.name}`]({path.name})"]
    ways = [f"[← {names[place - 1]}]({names[place - 1]}.md)", *ways] if place else ways
    ways = [*ways, f"[{names[place + 1]} →]({names[place + 1]}.md)"] if path != PAGES[-1] else ways
    return " · ".join(ways)


def main(names: list[str]) -> None:
    """Writes the pages of these names, or all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for path in [page for page in PAGES if not names or page.stem in names]:
        for old in IMAGES.glob(f"{path.stem}_*.png"):
            old.unlink()
        cells = read_cells(path.read_text(encoding="utf-8"))
        page = write_page(path, cells, run_cells(path, cells, IMAGES))
        path.with_suffix(".md").write_text(page, encoding="utf-8")
        print(f"{path.stem}: {len(page.splitlines())} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
