"""Write four Parquet files of points near a line into the folder that is named."""

import pathlib
import sys

import numpy as np
import pandas as pd


def main(folder):
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(4):
        x = draw.uniform(-1, 1, 2500)
        y = 3 * x - 0.5 + 0.05 * draw.standard_normal(2500)
        pd.DataFrame({"x": x, "y": y}).to_parquet(folder / f"part-{part}.parquet")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
