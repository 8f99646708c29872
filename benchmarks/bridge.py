"""Arrays handed over between JAX and torch: dlpack, and a copy through NumPy beside it in the same run.

    python benchmarks/bridge.py [--sizes 1e3 1e4 … 1e9] [--repeats 21] [--json benchmarks/bridge.json]

Prints a table. For each size and direction: whether both sides hold the same address, the median time of handing the
array over on one device, and that of a peer that copies. On a machine with CUDA the arrays are on the first card, and
the peer goes through the host. A hand-over that does not copy takes the same time for a kilobyte and a gigabyte.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridges import dlpack

SIZES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)


def median_seconds(function, repeats, wait):
    """Median time of function(), whose result is dropped before the next call; two calls first to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        result = function()
        wait(result)
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times[2:])


def wait_for_torch(_):
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def numpy_to_torch(array):
    return torch.from_numpy(np.array(array, copy=True)).to("cuda" if torch.cuda.is_available() else "cpu")


def numpy_to_jax(tensor):
    return jax.device_put(np.array(tensor.cpu().numpy(), copy=True), jax.devices()[0])


def aligned_tensor(count):
    """A torch tensor on 64 bytes, as XLA's own are; torch allocates large ones so, small ones by chance."""
    if torch.cuda.is_available():
        return torch.rand(count, device="cuda")
    whole = torch.rand(count + 16)
    return whole[(-whole.data_ptr() % 64) // 4 :][:count]


def measure(size, repeats):
    count = max(int(size) // 4, 1)
    array = jax.block_until_ready(jax.random.uniform(jax.random.key(0), (count,), jnp.float32))
    tensor = aligned_tensor(count)
    there, back = dlpack.to_torch(array), dlpack.to_jax(tensor)
    rows = {
        "jax to torch": {
            "same_address": there.data_ptr() == array.unsafe_buffer_pointer(),
            "dlpack": median_seconds(lambda: dlpack.to_torch(array), repeats, wait_for_torch),
            "numpy_copy": median_seconds(lambda: numpy_to_torch(array), repeats, wait_for_torch),
        },
        "torch to jax": {
            "same_address": back.unsafe_buffer_pointer() == tensor.data_ptr(),
            "dlpack": median_seconds(lambda: dlpack.to_jax(tensor), repeats, jax.block_until_ready),
            "numpy_copy": median_seconds(lambda: numpy_to_jax(tensor), repeats, jax.block_until_ready),
        },
    }
    assert np.array_equal(np.asarray(array[:1000]), there[:1000].cpu().numpy())
    assert np.array_equal(tensor[:1000].cpu().numpy(), np.asarray(back[:1000]))
    return [{"bytes": 4 * count, "direction": direction, **row} for direction, row in rows.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/bridge.json"))
    args = parser.parse_args()
    rows = [row for size in args.sizes for row in measure(size, args.repeats)]
    flat = {}
    for direction in ("jax to torch", "torch to jax"):
        times = [row["dlpack"] for row in rows if row["direction"] == direction]
        flat[direction] = {"slowest_over_fastest": max(times) / min(times), "slowest_microseconds": 1e6 * max(times)}
    report = {
        "benchmark": "bridge",
        "device": str(jax.devices()[0]),
        "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "torch": torch.__version__},
        "repeats": args.repeats,
        "all_same_address": all(row["same_address"] for row in rows),
        "dlpack": flat,
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("| bytes | direction | same address | dlpack, µs | NumPy copy, µs |\n|---|---|---|---|---|")
    for row in rows:
        same = "yes" if row["same_address"] else "no"
        times = f"{1e6 * row['dlpack']:.0f} | {1e6 * row['numpy_copy']:.0f}"
        print(f"| {row['bytes']:,} | {row['direction']} | {same} | {times} |")


if __name__ == "__main__":
    main()
