"""Measure the share of padding in a step, with rows in random order and with ``group_by_length``.

    python -m benchmarks.padding [DATASET]    # python-docs, by default; needs no GPU

tokenizes the dataset for tiny-llama and prints a line for each micro batch and number of processes: the share
of all positions that is padding, over one epoch in global batches of 32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from estimator import models
from launchers.dataset import sources
from launchers.dataset.order import padding_share
from launchers.dataset.prepared import Prepared
from launchers.models import weights
from launchers.run import preparation
from launchers.run_config import resolve
from launchers.settings import Settings

BATCH = 32
SHAPES = ((1, 4), (1, 16), (8, 2), (8, 4))  # processes, sequences of a micro batch


def main(dataset: str) -> None:
    settings = Settings(dataset=dataset, global_batch_size=BATCH, seq_len=2048)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = weights.fetch(models.locate("tiny-llama"), folder / "model")
        rows = list(preparation.read_samples(settings, sources.fetch(dataset, folder)))
        orders = {}
        for grouped in (False, True):
            chosen = settings.model_copy(update={"group_by_length": grouped})
            config = resolve(chosen, models.find("tiny-llama"), method="full", engine="torchtune")
            preparation.tokenize(rows, None, config, model, folder / str(grouped))
            data = Prepared(folder / str(grouped))
            orders[grouped] = data.order, data.row_lengths.astype(np.int64)
        print("\nprocesses  micro batch  drawn  grouped")
        for processes, micro_batch in SHAPES:
            random_order, by_length = (
                padding_share(*orders[grouped], batch=BATCH, processes=processes, micro_batch=micro_batch)
                for grouped in (False, True)
            )
            print(f"{processes:9}  {micro_batch:11}  {random_order:5.1%}  {by_length:7.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", nargs="?", default="python-docs", help="default: python-docs")
    main(parser.parse_args().dataset)
