"""Add pages and links from outside docs/ to the site; its first page begins with the README."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"benchmarks/RESULTS.md": "results.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ORIGINS = {page: origin for origin, page in PAGES.items()}
LINK = re.compile(r"]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Adds the pages of other folders."""
    for origin, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / origin)))
    return files


def story():
    """Returns the README without its last links: the beginning of the first page."""
    return (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Further\n")[0]


def on_page_markdown(markdown, page, config, files):
    """Makes each link, which is right in the repository, lead to a page of the site or to the repository's file."""
    here = page.file.src_uri

    def leads(text: str, folder: str) -> str:
        return LINK.sub(lambda link: lead(link, folder), text)

    def lead(link: re.Match, folder: str) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        inside = files.get_file_from_path(PAGES.get(target, target.removeprefix("docs/")))
        if inside and inside.inclusion.is_included():
            way = posixpath.relpath(inside.src_uri, posixpath.dirname(here) or ".")
        elif (ROOT / target).exists():
            way = f"{config.extra['repository']}/blob/main/{target}"
        else:
            return link[0]  # for the build to complain of
        return f"]({way}{link[2] or ''})"

    if here == "index.md":
        return leads(story(), "") + "\n\n" + leads(markdown[markdown.index("## ") :], "docs")
    return leads(markdown, posixpath.dirname(ORIGINS.get(here, f"docs/{here}")))


def on_page_content(html, page, config, files):
    """Lets names in tables break after their dots and underscores, and nowhere else (site.css)."""
    cells = re.compile(r"<td.*?</td>", re.DOTALL)
    words = re.compile(r"(?<=[a-z])([._])(?=[a-z])(?=[^<>]*<)")  # outside of tags
    return cells.sub(lambda cell: words.sub(r"\1<wbr>", cell[0]), html)
