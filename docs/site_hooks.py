"""What the site takes from outside docs/: pages that stand elsewhere, and links to the repository's other files."""

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


def on_page_markdown(markdown, page, config, files):
    """Makes each link, which is right in the repository, lead to a page of the site or to the repository's file."""
    here = page.file.src_uri
    folder = posixpath.dirname(ORIGINS.get(here, f"docs/{here}"))

    def lead(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        inside = files.get_file_from_path(PAGES.get(target, target.removeprefix("docs/")))
        if inside and inside.inclusion.is_included():
            way = posixpath.relpath(inside.src_uri, posixpath.dirname(here) or ".")
        elif (ROOT / target).exists():
            way = f"{config.extra['repository']}/blob/main/{target}"
        else:
            return link[0]  # for the build to complain of
        return f"]({way}{link[2] or ''})"

    return LINK.sub(lead, markdown)
