"""Fetch labels from a service that asks for a token, and count them."""

import argparse
import collections
import os

import requests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    args = parser.parse_args()

    token = os.environ["SERVICE_TOKEN"]
    answer = requests.get(args.url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
    answer.raise_for_status()
    print(dict(collections.Counter(answer.json()["labels"])))


if __name__ == "__main__":
    main()
