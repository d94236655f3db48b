"""Make the key that encrypts the secrets of tenants, or go over to a new one.

    python -m app.local.secrets_key            make the file, unless it exists
    python -m app.local.secrets_key --new      put a new key first in the file; older ones stay
    python -m app.local.secrets_key --again    encrypt all secrets with the first key of the file,
                                               the keys of images, and channels
    python -m app.local.secrets_key --lost     remove what no key of the file opens; make a key

The file is `ROUNDHOUSE_SECRETS_KEY`, HOME/secrets.key by default.  The API, control and the islands
read it at each use.  After `--new`, copy it to all of them, run `--again`, and remove the older
lines.
"""

from __future__ import annotations

import argparse
import sys

from app.db import transactions
from app.identity import image_keys, secret_store, secrets_key
from app.messaging import channels
from app.settings import settings
from app.storage.sealing import Keyring


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m app.local.secrets_key", description=__doc__)
    parser.add_argument("--new", action="store_true", help="put a new key first in the file")
    parser.add_argument("--again", action="store_true", help="encrypt all secrets with it")
    parser.add_argument("--lost", action="store_true", help="remove what no key opens")
    asked = parser.parse_args()
    path = settings().secrets_key_file
    with transactions.transaction() as session:
        try:
            Keyring.make(path) if asked.lost else secrets_key.make(session, path)
        except secrets_key.KeyLost as error:
            parser.exit(1, f"{error}\n")
        removed = secrets_key.forget_lost(session, path) if asked.lost else 0
    if asked.new:
        Keyring.add(path)
    told = f"{path} has {len(path.read_text('ascii').split())} keys\n"
    if asked.lost:
        told += f"{removed} secrets, keys of images and channels that no key opens were removed\n"
    if asked.again:
        with transactions.transaction() as session:
            told += f"{secret_store.encrypt_again(session)} secrets were encrypted again\n"
            told += f"{image_keys.encrypt_again(session)} keys of images were encrypted again\n"
            told += f"{channels.encrypt_again(session)} channels were encrypted again\n"
    sys.stdout.write(told)


if __name__ == "__main__":
    main()
