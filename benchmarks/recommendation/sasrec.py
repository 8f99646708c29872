"""SASRec (Kang & McAuley 2018, https://arxiv.org/abs/1808.09781) on the project's data: a peer in PyTorch.

    python benchmarks/recommendation/sasrec.py [--config recommendation_beauty] [--seed 0] [--epochs 25] [--limit USERS]
                                               [--json FILE] [--ranks FILE.npy]

A causal Transformer over a user's items; the next item is scored by the cosine of its embedding and the last state over
a temperature, which learns faster here than their plain product. It is trained on all items of a user but the
last two, with a sampled softmax: the target against items drawn uniformly for the batch, corrected for
how rarely each is drawn. With one negative, as first published, SASRec earns much less (Klenitskiy & Vasilev 2023,
https://arxiv.org/abs/2309.07602; Petrov & Macdonald 2023, https://arxiv.org/abs/2308.07192). The epoch that is best on
validation users is kept.

Then the whole catalogue is ranked for every test user by the project's own code: the history left out, ties against the
target. Two lines come of it: SASRec, and its log-softmax with PRIOR. Prints a table on stderr and JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_jax.config.command_line import find_config, load_config
from grpo_jax.tasks.recommendation.baselines import gain, make_prior, rank_all
from grpo_jax.tasks.recommendation.dataset import Dataset, load_dataset
from grpo_jax.tasks.recommendation.report import format_table, make_table, table_records
from grpo_jax.tasks.recommendation.sections import PriorSection

PRIOR = PriorSection(history=20.0, together=10.0, decay=0.7)
"""The best beside SASRec on Beauty's validation users, of a grid."""


class SASRec(nn.Module):
    """Items int [B, L], filled up on the right with any → states f32 [B, L, width]; a state sees none after it.

    A state's product with a row of `table` is the item's logit: their cosine / temperature.
    """

    def __init__(
        self, items: int, *, width: int, layers: int, heads: int, length: int, dropout: float, temperature: float
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(length, width)
        for table in (self.items, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, width, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor) -> Tensor:
        length, width = items.shape[1], self.items.embedding_dim
        states = self.drop(self.items(items) * width**0.5 + self.places.weight[:length])
        later = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            states = layer(states, src_mask=later, is_causal=True)
        return functional.normalize(self.norm(states), dim=-1) / self.temperature

    def table(self) -> Tensor:
        """Embeddings of unit length, f32 [I, width]."""
        return functional.normalize(self.items.weight, dim=-1)


def batched(sequences: Sequence[Sequence[int]], size: int, order: np.ndarray) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Batches of sequences of like lengths, int [B, L] filled up with 0 on the right, and which they are.

    Args:
        sequences: All.
        size: B, at most.
        order: Permutation of them; those of a length keep it, and so do the batches.
    """
    by_length = sorted(order.tolist(), key=lambda place: len(sequences[place]))
    parts = [np.array(by_length[start : start + size]) for start in range(0, len(by_length), size)]
    for part in sorted(parts, key=lambda part: int(np.flatnonzero(order == part[0])[0])):
        longest = max(len(sequences[place]) for place in part)
        filled = np.zeros((len(part), longest), np.int64)
        for line, place in enumerate(part):
            filled[line, : len(sequences[place])] = sequences[place]
        yield torch.from_numpy(filled), part


def sampled_softmax(states: Tensor, targets: Tensor, negatives: Tensor, table: Tensor) -> Tensor:
    """-log p of the targets among themselves and N items drawn uniformly, mean over the steps.

    A drawn item stands for I / N items, so log(I / N) is added to its logit: the sum over what was drawn is then an
    unbiased estimate of the sum over the catalogue (Bengio & Senécal 2008). One that is the target counts as nothing.

    Args:
        states: f32 [S, width].
        targets: int [S].
        negatives: int [N].
        table: Embeddings f32 [I, width].
    """
    own = (states * table[targets]).sum(1)
    others = (states @ table[negatives].T).masked_fill_(negatives[None] == targets[:, None], -torch.inf)
    drawn = torch.logsumexp(others, 1) + math.log(len(table) / len(negatives))
    return (torch.logaddexp(own, drawn) - own).mean()


def train_epoch(model: SASRec, optimizer: Any, taught: list[tuple[int, ...]], options: Any, rng: Any) -> float:
    """One pass over the sequences; the mean loss."""
    losses, items = [], model.train().items.num_embeddings
    for batch, places in batched(taught, options.batch, rng.permutation(len(taught))):
        lengths = torch.tensor([len(taught[place]) for place in places])
        known = torch.arange(batch.shape[1] - 1)[None] < (lengths - 1)[:, None]
        negatives = torch.from_numpy(rng.integers(0, items, min(options.negatives, items)))
        loss = sampled_softmax(model(batch[:, :-1])[known], batch[:, 1:][known], negatives, model.table())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


@torch.inference_mode()
def scorer(model: SASRec, rows: Sequence[Any], length: int) -> Callable[[int, int], np.ndarray]:
    """score(start, stop) → log-softmax f32 [B, I] over the catalogue for the rows' histories (`baselines.Scores`)."""
    histories = [row.columns["history"][-length:] for row in rows]
    states = torch.empty(len(rows), model.items.embedding_dim)
    for batch, places in batched(histories, 256, np.arange(len(rows))):
        last = torch.tensor([len(histories[place]) - 1 for place in places])
        states[torch.from_numpy(places)] = model.eval()(batch)[torch.arange(len(places)), last]
    table = model.table()
    return lambda start, stop: torch.log_softmax(states[start:stop] @ table.T, 1).numpy()


def train(dataset: Dataset, options: argparse.Namespace) -> tuple[SASRec, list[dict[str, float]]]:
    """The model of the best epoch on validation users, and what every epoch came to."""
    torch.manual_seed(options.seed)
    rng = np.random.Generator(np.random.PCG64(options.seed))
    known = [user.items[-options.length - 1 :] for user in dataset.known]
    taught = [items for items in known if len(items) > 1][: options.limit or None]
    shape = {name: getattr(options, name) for name in ("width", "layers", "heads", "length", "dropout", "temperature")}
    model = SASRec(len(dataset.catalogue), **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=True)
    watched = dataset.prompts.validation[: options.validation]
    best: tuple[float, dict[str, Tensor]] = (-1.0, {})
    epochs: list[dict[str, float]] = []
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        loss = train_epoch(model, optimizer, taught, options, rng)
        seconds = time.perf_counter() - start
        ranks = rank_all(scorer(model, watched, options.length), watched, items=len(dataset.catalogue))
        found = float(gain("ndcg", ranks, k=10).mean())
        epochs.append({"epoch": epoch, "loss": loss, "validation_ndcg@10": found, "seconds": seconds})
        print(f"epoch {epoch:>3}  loss {loss:.4f}  validation NDCG@10 {found:.4f}  {seconds:.1f} s", file=sys.stderr)
        if found > best[0]:
            best = found, {name: value.clone() for name, value in model.state_dict().items()}
        since = epoch - max(epochs, key=lambda one: one["validation_ndcg@10"])["epoch"]
        if since >= options.patience:
            break
    model.load_state_dict(best[1])
    return model, epochs


def measure(model: SASRec, dataset: Dataset, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The ranks f64 [U] of the test users by method."""
    rows = dataset.prompts.test[: options.limit or None]
    score = scorer(model, rows, options.length)
    known = make_prior(PRIOR, dataset.catalogue.titles, dataset.known)
    histories, count = [row.columns["history"] for row in rows], len(dataset.catalogue)

    def fused(start: int, stop: int) -> np.ndarray:
        return score(start, stop) + known(histories[start:stop])

    return {"SASRec": rank_all(score, rows, items=count), "SASRec + prior": rank_all(fused, rows, items=count)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="recommendation_beauty", help="whose data (default: %(default)s)")
    parser.add_argument("--source", help="a sequential.txt or events in place of the config's")
    parser.add_argument("--catalogue", help="the items of --source")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=25, help="at most (default: %(default)s)")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better one (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, metavar="USERS", help="for a quick try: so many, 0 for all")
    parser.add_argument("--validation", type=int, default=4000, help="users the epoch is chosen on")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--length", type=int, default=50, help="newest items that are looked at")
    parser.add_argument("--dropout", type=float, default=0.4)
    parser.add_argument("--temperature", type=float, default=0.07, help="that cosines are divided by")
    parser.add_argument("--negatives", type=int, default=512, help="items drawn for a batch")
    parser.add_argument("--batch", type=int, default=256, help="users")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--json", help="also write the report there")
    parser.add_argument("--ranks", help="write the ranks there (.npy, f64 [methods, users] as they are tested)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    task = load_config(find_config(options.config)).task
    changed = {name: getattr(options, name) for name in ("source", "catalogue") if getattr(options, name)}
    dataset = load_dataset(task.replace(**changed))
    start = time.perf_counter()
    model, epochs = train(dataset, options)
    trained = time.perf_counter() - start
    ranks = measure(model, dataset, options)
    table = make_table(ranks)
    report = {
        "benchmark": "sasrec",
        "options": {name: value for name, value in vars(options).items() if name not in ("json", "ranks")},
        "seconds": {"train": round(trained, 1), "all": round(time.perf_counter() - start, 1)},
        "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "prior": vars(PRIOR),
        "epochs": epochs,
        "table": table_records(table),
    }
    if options.ranks:
        np.save(options.ranks, np.stack(list(ranks.values())))
    print(json.dumps(report, indent=2))
    print(format_table(table), file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
