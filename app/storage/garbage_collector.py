"""Garbage collection of the store, without locks, while others read and write.

A name is removed in two steps.  First it is *condemned*: moved to where readers still find it but
writers do not.  A grace period later it is deleted, unless it turned out to be referenced; then it
is moved back.

Why no referenced data is ever lost:
* A writer relies on a chunk only if it found or put the chunk less than half a grace period before
  its manifest is stored (`workers.transfer.checkpoint`).  It never looks among condemned names.
* So if a chunk is condemned between the two, its manifest exists long before the chunk would be
  deleted; and references are read again before anything is deleted.
* A reader that began earlier has a whole grace period to finish.

Chunks are referenced by manifests of their tenant; manifests, blobs and parts of uploads by rows.
Rows are written later than the bytes (a message has to arrive), so data without a row stays for
`ORPHANED_S` first.  One collector works at a time: the caller ensures that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from app.core.model.checkpoints.manifest import BadManifest, decode
from app.storage.backend import Missing, Named
from app.storage.chunks import CHUNKS, CONDEMNED, DAMAGED, fetched
from app.storage.signing import unverified
from app.storage.store import BLOBS, MANIFESTS, UPLOADS, Store

log = logging.getLogger(__name__)

# seconds for which data without a row stays, as a device may be cut off from its island for that
# long
ORPHANED_S = 86400.0

#: A function that takes names (of blobs, manifests and parts of uploads), and returns the names to
#: which rows refer.
Rows = Callable[[Collection[str]], set[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Counts the names that were condemned, deleted, or found to be referenced after all."""

    condemned: int = 0
    deleted: int = 0
    restored: int = 0


class Collector:
    def __init__(self, store: Store, rows: Rows, *, orphaned_s: float = ORPHANED_S) -> None:
        self.store, self.place = store, store.place
        self.rows, self.orphaned_s = rows, orphaned_s
        # manifest -> the chunks that it names; kept between rounds, as a manifest never changes
        self._read: dict[str, frozenset[str]] = {}

    def sweep(self) -> Swept:
        """Run one round.

        It may be stopped at any point, or fail because the store is unreachable, without harm.
        """
        now_s, grace_s = self.place.now_s(), self.store.grace_s

        # 1. Candidates: names that are old enough.  They are listed before their references.
        without_row = chain(*(self.place.listed(kind) for kind in (BLOBS, MANIFESTS, UPLOADS)))
        old = _older(without_row, self.orphaned_s, now_s)
        old += _older(self.place.listed(CHUNKS), grace_s, now_s)
        waiting = list(self.place.listed(CONDEMNED))

        # 2. References.
        is_named = self._named([*old, *(_before(found.name) for found in waiting)])

        # 3. Condemn candidates without references; move back or delete condemned names.
        gone = sum(condemned(self.store, name) for name in old if not is_named(name))
        back = [found.name for found in waiting if is_named(_before(found.name))]
        for name in back:
            self._bring_back(name)
        late = set(_older(waiting, grace_s, now_s)) - set(back)

        # 4. Delete old damaged and condemned names, and writes that never got a name.
        late |= set(_older(self.place.listed(DAMAGED), self.orphaned_s, now_s))
        for name in late:
            self.place.delete(name)
        left = self.place.tidy(older_than_s=grace_s)
        return Swept(condemned=gone, deleted=len(late) + left, restored=len(back))

    def _bring_back(self, name: str) -> None:
        if self.place.size(_before(name)) is None:
            self.place.move(name, _before(name))
        else:  # it was put again meanwhile
            self.place.delete(name)

    # --- references ---

    def _named(self, doubtful: Collection[str]) -> Callable[[str], bool]:
        chunks = {name for name in doubtful if name.startswith(f"{CHUNKS}/")}
        by_rows = self.rows([name for name in doubtful if name not in chunks])
        by_manifests = self._addresses({_tenant(name) for name in chunks})

        def is_named(name: str) -> bool:
            if name not in chunks:
                return name in by_rows
            addresses = by_manifests[_tenant(name)]
            return addresses is None or name.rpartition("/")[2] in addresses

        return is_named

    def _addresses(self, tenants: Collection[str]) -> dict[str, set[str] | None]:
        """Return the chunks to which the manifests of each tenant refer; condemned manifests count,
        too.

        None means "perhaps all": if a manifest of a tenant cannot be read, nothing of the tenant is
        deleted.
        """
        found: dict[str, set[str] | None] = {tenant: set() for tenant in tenants}
        read: dict[str, frozenset[str]] = {}
        for name in self._manifests(tenants):
            tenant = _tenant(_before(name))
            try:
                read[name] = self._read.get(name) or self._addresses_in(name)
            except Missing:
                continue  # deleted meanwhile
            except BadManifest as error:
                log.error("%s: %s; nothing of this tenant is collected", name, error)
                found[tenant] = None
                continue
            if (so_far := found[tenant]) is not None:
                so_far |= read[name]
        self._read = read
        return found

    def _manifests(self, tenants: Collection[str]) -> list[str]:
        folders = [f"{MANIFESTS}/{tenant}" for tenant in sorted(tenants)]
        everywhere = [*folders, *(f"{CONDEMNED}/{folder}" for folder in folders)]
        return [found.name for folder in everywhere for found in self.place.listed(folder)]

    def _addresses_in(self, name: str) -> frozenset[str]:
        return decode(unverified(fetched(self.place, _before(name)))).addresses


def condemned(store: Store, name: str) -> bool:
    """Condemn a name without references; False if it does not exist."""
    try:
        store.place.move(name, f"{CONDEMNED}/{name}")
    except Missing:
        return False
    return True


def _older(found: Iterable[Named], than_s: float, now_s: float) -> list[str]:
    return [one.name for one in found if now_s - one.changed_s > than_s]


def _before(name: str) -> str:
    """The original name of a condemned name."""
    return name.removeprefix(f"{CONDEMNED}/")


def _tenant(name: str) -> str:
    return name.split("/")[1]
