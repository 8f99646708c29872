"""docs/ as a site: it builds without a warning, uses no other host, and has every public name."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.imports import ROOT

import grpo_jax
from grpo_jax import core

mkdocstrings = pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")

pytestmark = pytest.mark.wide  # `make docs` runs them on the site that it has built
SHAPES = ("ul", "ol", "li", "pre", "table", "tr")
ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts)
ELSEWHERE = {"benchmarks/RESULTS.md": "results", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}


class Tags(HTMLParser):
    """All tags of a page with their attributes, and those of its article alone."""

    def __init__(self, text: str):
        """Reads the page."""
        super().__init__()
        self.all, self.article, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside |= tag == "article"
        self.all.append((tag, dict(attrs)))
        if self.inside:
            self.article.append(tag)

    def handle_endtag(self, tag):
        self.inside &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, by the command of `make docs`, which calls these tests with its own as SITE."""
    if "SITE" in os.environ:
        return Path(os.environ["SITE"])
    folder = tmp_path_factory.mktemp("site")
    (line,) = re.findall(r"\$\(BIN\)/python (-m mkdocs .*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    command = [sys.executable, *line.split(), "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def tags(site):
    return {path: Tags(path.read_text()) for path in site.rglob("*.html")}


def test_nothing_comes_from_another_host(site, tags):
    """No fonts, scripts or pictures; links that a reader may click lead anywhere."""
    asked = {
        (path.name, attributes[ASSETS[tag]])
        for path, page in tags.items()
        for tag, attributes in page.all
        if tag in ASSETS and re.match(r"(https?:)?//", attributes.get(ASSETS[tag]) or "")
    }
    assert len(tags) > 30 and not asked
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\s]*", style.read_text()), style.name
    # With repo_url the theme's script asks GitHub for its stars (a tab links it); with a diagram for a library.
    assert "repo_url" not in (ROOT / "mkdocs.yml").read_text()
    assert not any("mermaid" in (attributes.get("class") or "") for page in tags.values() for _, attributes in page.all)


def test_every_public_name_is_in_the_reference(site):
    with (site / "objects.inv").open("rb") as file:
        known = set(mkdocstrings.Inventory.parse_sphinx(file))
    modules = [importlib.import_module(f"grpo_jax.core.{found.name}") for found in pkgutil.iter_modules(core.__path__)]
    functions = {
        f"{module.__name__}.{name}"
        for module in modules
        for name, found in vars(module).items()
        if (inspect.isfunction(found) or inspect.isclass(found))
        and found.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert len(functions) > 40 and not functions - known
    assert not {f"grpo_jax.{grpo_jax._PLACES[name]}.{name}" for name in grpo_jax.__all__} - known
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert set(re.findall(r"\[`(\w+)`]", index)) == set(grpo_jax.__all__)


def page_of(path: Path) -> str:
    """Return the path of a page of docs/ in the site."""
    name = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
    return name.removesuffix("index").rstrip("/")


@pytest.mark.parametrize(
    ("source", "place"), [(str(path.relative_to(ROOT)), page_of(path)) for path in PAGES] + list(ELSEWHERE.items())
)
def test_lists_tables_and_code_are_what_they_are_on_github(source, place, tags, site):
    """The two read indented text and lists differently."""
    from markdown_it import MarkdownIt

    markdown = (ROOT / source).read_text()
    if source == "docs/index.md":
        story = (ROOT / "README.md").read_text().partition("\n## Further\n")[0]
        markdown = story + markdown[markdown.index("\n## ") :]
    text = MarkdownIt("commonmark").enable("table").render(markdown)
    expected, found = Tags(f"<article>{text}</article>").article, tags[site / place / "index.html"].article
    assert {tag: found.count(tag) for tag in SHAPES} == {tag: expected.count(tag) for tag in SHAPES}


def test_names_in_tables_break_after_dots_and_underscores_alone(site):
    """A narrow screen broke "policy.p / ath"."""
    page = (site / "coming_from_trl" / "index.html").read_text()
    assert "<code>policy.<wbr>path</code>" in page and "word-break: normal" in (site / "site.css").read_text()
