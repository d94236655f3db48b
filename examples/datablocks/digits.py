"""Write scikit-learn's 1,797 handwritten digits into a file of tensors.

python examples/datablocks/digits.py digits.safetensors
"""

import sys

import numpy
from safetensors.numpy import save_file
from sklearn.datasets import load_digits


def main(path):
    bundled = load_digits()
    images = bundled.images.astype(numpy.uint8)  # (1797, 8, 8), from 0 to 16
    labels = bundled.target.astype(numpy.int64)
    save_file({"images": images, "labels": labels}, path)
    print(f"{path}: {len(labels)} digits")


if __name__ == "__main__":
    main(*sys.argv[1:])
