"""One HTML file that stands alone: its style, its one script, and a policy that lets nothing else run or be fetched."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def document(title: str, sections: Iterable[str], data: Mapping[str, Any] | None = None) -> str:
    """The page.

    Args:
        title: Of the browser's window.
        sections: HTML, in which all text is escaped.
        data: What page.js reads, as JSON.
    """
    style, *scripts = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "tables.js", "page.js"))
    script = "".join(scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}</main>{_data(data)}<script>{script}</script></body></html>\n"
    )


def _data(data: Mapping[str, Any] | None) -> str:
    """JSON in which nothing ends its element: no < is left in it."""
    if data is None:
        return ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"<script type='application/json' id='data'>{text}</script>"
