"""A database of rel-amazon's size, from Parquet to an epoch of a churn task: 15 million reviews at scale 1.

    python -m benchmarks large_database --scale 0.01 --folder /data/reviews
    python -m benchmarks large_database --folder /data/reviews --only prepare

Five tables. Reviews have a text vector of 300 floats in float16, in a `.npy` file beside the Parquet files: 9 GB at
scale 1. Files that the folder has already are used again. Preparation is from Parquet to what steps read; it and the
epochs are apart in the results. The first epoch has the compilation; each ends with all validation examples. What was
asked for at scale 1: preparation within 5 minutes on 16 cores, and an epoch within 60 s on one GPU.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import Save
from dejax.datasets import HeteroDataset, from_tables, task_of_events
from dejax.datasets.files._work import for_blocks

ROWS = {"customers": 1_850_000, "products": 506_000, "brands": 60_000, "categories": 500, "reviews": 15_000_000}
WIDTH = 300
DAYS = 20 * 365
START = np.datetime64("1997-01-01", "s")
_PART = 1 << 20  # rows that are made and written at once


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows")
    parser.add_argument("--folder", type=Path, required=True, help="of the files, which are made if they are missing")
    parser.add_argument("--only", choices=("files", "prepare", "epoch"), default="epoch", help="the last thing to do")
    parser.add_argument("--batch-size", type=int, default=2048, help="training examples of a step")
    parser.add_argument("--epochs", type=int, default=2, help="the first one has the compilation")


def write_files(folder: Path, scale: float) -> None:
    """The Parquet files of the tables, and the vectors of reviews; some customers stop, so that churn can be learnt."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    counts = {table: max(4, int(rows * scale)) for table, rows in ROWS.items()}
    rng = np.random.default_rng(0)
    tables = {
        "categories": {"id": np.arange(counts["categories"]), "depth": rng.integers(1, 6, counts["categories"])},
        "brands": {"id": np.arange(counts["brands"]), "founded": rng.integers(1900, 2010, counts["brands"])},
        "products": {
            "id": np.arange(counts["products"]),
            "brand": rng.integers(0, counts["brands"], counts["products"]),
            "category": rng.integers(0, counts["categories"], counts["products"]),
            "price": rng.lognormal(3, 1, counts["products"]).round(2),
        },
        "customers": {"id": np.arange(counts["customers"])},
    }
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    stops = rng.integers(DAYS // 4, 2 * DAYS, counts["customers"])
    rows = counts["reviews"]
    vectors = np.lib.format.open_memmap(folder / "reviews.npy", "w+", np.float16, (rows, WIDTH))

    def written(number: int, start: int, stop: int) -> None:
        own = np.random.default_rng([1, number])
        vectors[start:stop] = own.standard_normal((stop - start, WIDTH), np.float32)

    for_blocks(written, rows, _PART // 32, label="vectors")
    writer = None
    for at in range(0, rows, _PART):
        count = min(_PART, rows - at)
        customer = (counts["customers"] * rng.random(count) ** 2).astype(np.int64)
        day = (np.minimum(stops[customer], DAYS) * rng.random(count)).astype(np.int64)
        part = pa.table(
            {
                "customer": customer,
                "product": (counts["products"] * rng.random(count) ** 2).astype(np.int64),
                "at": START + day.astype("timedelta64[D]") + rng.integers(0, 86_400, count).astype("timedelta64[s]"),
                "rating": rng.integers(1, 6, count).astype(np.int8),
                "verified": rng.random(count) < 0.8,
            }
        )
        writer = writer or parquet.ParquetWriter(folder / "reviews.parquet", part.schema)
        writer.write_table(part)
    if writer is not None:
        writer.close()


def database(folder: Path) -> HeteroDataset:
    """The tables as a graph, with the task "churn": no review in the 90 days after a cutoff, of active customers."""
    data = from_tables(
        folder,
        dict.fromkeys(("customers", "products", "brands", "categories"), "id"),
        [
            ("reviews", "customer", "customers"),
            ("reviews", "product", "products"),
            ("products", "brand", "brands"),
            ("products", "category", "categories"),
        ],
        {"reviews": "at"},
        vectors={"reviews": {"text": np.load(folder / "reviews.npy", mmap_mode="r")}},
        fixed_features=False,
        name="large database",
    )
    quarters = [START + np.timedelta64(day, "D") for day in range(DAYS * 7 // 10, DAYS - 180, 90)]
    task = task_of_events(
        data,
        "churn",
        ("reviews", "customer"),
        quarters,
        "90 days",
        how="none",
        active="180 days",
        valid_from=quarters[-2],
        test_from=quarters[-1],
    )
    return data.with_task(task)


def peak() -> int:
    """Bytes of the process at its most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(what: str, found: dict[str, Any], do: Callable[[], Any]) -> Any:
    """The result of a function, whose seconds, CPU seconds and peak of memory go into `found`."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = do()
    found[what] = {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": peak(),
    }
    seconds, cpu_seconds, most = found[what].values()
    print(f"{what}: {seconds:.1f} s, {cpu_seconds:.1f} s of CPU, peak {most / 2**30:.2f} GiB")
    return result


def run(args: argparse.Namespace, save: Save) -> None:
    """Makes the files, prepares, and trains some epochs."""
    found: dict[str, Any] = {"scale": args.scale, "rows": {t: max(4, int(n * args.scale)) for t, n in ROWS.items()}}
    if not (args.folder / "reviews.parquet").is_file():
        timed("files", found, lambda: write_files(args.folder, args.scale))
    if args.only == "files":
        return
    before = peak()
    data = timed("tables", found, lambda: database(args.folder))
    print(data.tasks["churn"].summary())
    from dejax.training import Trainer, resolve

    given = {"epochs": args.epochs, "batch_size": args.batch_size}
    trainer = timed("trainer", found, lambda: Trainer(resolve(data.name, task="tables", **given), data))
    found["examples_per_epoch"], found["steps_per_epoch"] = trainer.task.seeds_per_epoch, trainer.task.steps_per_epoch
    found["bytes_per_review"] = (peak() - before) / data.num_nodes["reviews"]
    print(f"{found['bytes_per_review']:,.0f} bytes a review at most")
    save(found)
    if args.only == "prepare":
        return
    state = trainer.init(0)
    for epoch in range(args.epochs):
        state = timed(f"epoch {epoch}", found, lambda: trainer.train(state, epoch + 1))  # noqa: B023
        found["compile_seconds"] = trainer.compile_seconds
        save(found)
