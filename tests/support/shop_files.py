"""A generated world as a user's files."""

from pathlib import Path

from grpo_jax.tasks.recommendation.catalogue import Catalogue, Sequences


def write_shop(folder: Path, world: tuple[Catalogue, Sequences]) -> dict[str, str]:
    """Write items.tsv and sequential.txt; the fields of the task that name them."""
    catalogue, sequences = world
    lines = [f"{name}\t{title}\n" for name, title in zip(catalogue.ids, catalogue.titles, strict=True)]
    (folder / "items.tsv").write_text("item_id\ttitle\n" + "".join(lines))
    users = [(user.user, [catalogue.ids[row] for row in user.items]) for user in sequences.users]
    (folder / "sequential.txt").write_text("".join(f"{user} {' '.join(items)}\n" for user, items in users))
    return {"source": str(folder / "sequential.txt"), "catalogue": str(folder / "items.tsv")}
