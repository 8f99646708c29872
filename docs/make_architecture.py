"""Draw the packages and their imports, from the imports of every file.

    python docs/make_architecture.py      # writes docs/images/architecture.svg

An arrow that follows from two others is left out: runs → tasks → rollout says that runs import rollout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "images" / "architecture.svg"
ROOMS = {
    "commands": "train, evaluate, export, predict, recommend",
    "cartpole": "the core alone: a training function",
    "planning": "memory and bounds of a run",
    "reports": "console, metrics, report.html",
    "runs": "the loop, checkpoints, evaluation",
    "tasks": "prompts, renderers, measures of a task",
    "rollout": "data, chat, environments, rewards",
    "training": "batch, update, optimizer, state",
    "sampling": "token choice, decoding",
    "models": "policies in Flax, Hugging Face folders",
    "core": "losses and advantages, pure functions",
    "config": "sections, reader, help",
    "bridges": "PyTorch judges, Ray, dlpack",
}
WIDTH, HEIGHT, GAP, STEP = 250, 46, 26, 40


def room_of(module: str) -> str:
    """Return the room of a module; "" for what all may import: errors and ready-made rewards."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    if package == "bridges":
        return "bridges"
    if package != "grpo_jax" or room in ("", "errors", "rewards"):
        return ""
    return room if room in ROOMS else "commands"


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, inside functions too, and those that it names to `own_package`."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    yield from re.findall(r'own_package\("([\w.]+)"', source)


def room_graph() -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for package in ("grpo_jax", "bridges"):
        for path in sorted((ROOT / package).rglob("*.py")):
            room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            if room:
                graph[room] |= {room_of(module) for module in imported(path)} - {room, ""}
    return graph


def reach(graph: dict[str, set[str]], room: str) -> set[str]:
    """Return every room that a room imports, directly or through others."""
    return graph[room].union(*(reach(graph, other) for other in graph[room]))


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out the arrows that follow from two others."""
    return {room: below - set().union(*(reach(graph, other) for other in below)) for room, below in graph.items()}


def level(graph: dict[str, set[str]], room: str) -> int:
    """Return how far from the ground a room stands: one below the lowest that imports it, the top by the longest way."""
    above = [other for other in graph if room in graph[other]]
    if above:
        return min(level(graph, other) for other in above) - 1
    return _depth(graph, room)


def _depth(graph: dict[str, set[str]], room: str) -> int:
    return max((_depth(graph, other) + 1 for other in graph[room]), default=0)


def render() -> str:
    """Return the picture as SVG."""
    graph = direct(room_graph())
    levels: dict[int, list[str]] = {}
    for room in ROOMS:
        levels.setdefault(level(graph, room), []).append(room)
    columns, rows = max(map(len, levels.values())), len(levels)
    width = columns * (WIDTH + GAP) + GAP
    corners = {}
    for depth, rooms in levels.items():
        start = (width - len(rooms) * (WIDTH + GAP) + GAP) / 2
        for place, room in enumerate(rooms):
            corners[room] = (start + place * (WIDTH + GAP), GAP + (rows - 1 - depth) * (HEIGHT + STEP))
    height = rows * (HEIGHT + STEP) - STEP + 2 * GAP
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#8a8f98"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(_arrow(corners[room], corners[other]) for room in ROOMS for other in sorted(graph[room])),
        *(_box(room, *corners[room]) for room in ROOMS),
        "</svg>\n",
    ])  # fmt: skip


def _box(room: str, x: float, y: float) -> str:
    middle = x + WIDTH / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3fc" stroke="#2a6fdb"/>'
        f'<text x="{middle:g}" y="{y + 19:g}" text-anchor="middle" font-size="14" font-weight="bold">{room}</text>'
        f'<text x="{middle:g}" y="{y + 36:g}" text-anchor="middle" font-size="11.5" fill="#444">{escape(ROOMS[room])}</text>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    x1, x2, y1 = x1 + WIDTH / 2, x2 + WIDTH / 2, y1 + HEIGHT
    half = (y2 - y1) / 2
    return (
        f'<path d="M{x1:g} {y1:g} C{x1:g} {y1 + half:g} {x2:g} {y2 - half:g} {x2:g} {y2:g}" fill="none" '
        'stroke="#8a8f98" stroke-width="1.4" marker-end="url(#tip)"/>'
    )


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
