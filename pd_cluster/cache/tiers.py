"""A prefix cache with tiers below the device: host memory, and below that storage.

    device   PrefixCache (this)      pages, tree, locks as ever
      │ ▲      CopyOut / CopyIn
    host     PrefixCache             a pool and a tree of its own, over host pages
      │ ▲      StoreBlocks / FetchBlocks
    storage  whole blocks by hash    known only to whom asks it

A tier is written and read as a peer's pages are: pages are private or locked while something copies
them, and enter a tree once they are written. So a prefix on several tiers is in several trees, and
what holds for one pool (five states that add up; nothing in use is freed) holds for each.

A request that arrives is promoted (`promote`): what storage has beyond the host is read, and when
its turn comes (`ready`) what the host has beyond the device is loaded, while others compute. It is
locked until the request has claimed it (`settle`). HiCache (Xie et
al., 2025, "Strata"; SGLang) is what the policies and their names are from.
"""

from __future__ import annotations

import numpy as np

from pd_cluster.cache.events import CacheEvent, StorageHolds
from pd_cluster.cache.eviction import EvictionPolicy
from pd_cluster.cache.node import Node, Tokens
from pd_cluster.cache.page_pool import OutOfPages, PagePool, Pages
from pd_cluster.cache.prefix_cache import Match, PrefixCache, Published
from pd_cluster.cache.tier_books import (
    Backup,
    Fetch,
    Load,
    Promotion,
    Segment,
    TierRead,
    TierStatistics,
    publish_segments,
    segments_of,
)
from pd_cluster.cache.tier_ops import (
    CopyIn,
    CopyOut,
    FetchBlocks,
    PrefetchPolicy,
    ProbeBlocks,
    StopFetch,
    StoreBlocks,
    TierEvent,
    TierOp,
    WritePolicy,
)
from pd_cluster.cache.tier_policy import Rate, prefetch_deadline, worth_loading


class TieredCache(PrefixCache):
    """`host` is the cache of the host tier, with the same page size; nobody else uses it.

    `storage_block` (tokens, a multiple of the page size) is the unit of storage, None where there
    is no storage. Operations are given out by `take_ops` and must be carried out in order, at once
    where they say so; their ends are told to `tier_event`.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        policy: EvictionPolicy,
        *,
        host: PrefixCache,
        enabled: bool = True,
        record_events: bool = False,
        write_policy: WritePolicy = "write_through",
        storage_block: int | None = None,
        prefetch_policy: PrefetchPolicy = "timeout",
    ) -> None:
        super().__init__(pool, page_size, policy, enabled=enabled, record_events=record_events)
        assert host.page_size == page_size
        assert storage_block is None or storage_block % page_size == 0
        self.host = host
        self.write_policy = write_policy
        self.prefetch_policy = prefetch_policy
        self.storage_block = storage_block
        self.load_rate = Rate()
        self.fetch_rate = Rate()
        self.compute_rate = Rate()
        self._ops: list[TierOp] = []
        self._next_op = 0
        self._backups: dict[int, Backup] = {}
        self._loads: dict[int, Load] = {}
        self._probes: dict[int, Promotion] = {}
        self._fetches: dict[int, Fetch] = {}
        self._stores: dict[int, tuple[Pages, int]] = {}
        self.copying_out = 0  # device pages that cannot be evicted meanwhile
        self._reads: list[TierRead] = []
        self._totals = dict.fromkeys(TierStatistics.__dataclass_fields__, 0)

    # --- as a prefix cache ---

    def match(
        self, tokens: Tokens, namespace: str | None = None, *, now: float, count_hit: bool
    ) -> Match:
        match = super().match(tokens, namespace, now=now, count_hit=count_hit)
        if count_hit and self.enabled:
            # A hit counts wherever the prefix lies, so that a score outlives a stay below.
            self.host.match(tokens, namespace, now=now, count_hit=True)
            if self.write_policy == "write_through_selective" and match.length:
                # Whatever is hit has been used twice: by who published it, and now.
                self._back_up(tokens[: match.length], match.pages, namespace, now)
        return match

    def publish(
        self,
        tokens: Tokens,
        pages: Pages,
        namespace: str | None = None,
        *,
        now: float,
        priority: int = 0,
        hits: int = 0,
    ) -> Published:
        published = super().publish(tokens, pages, namespace, now=now, priority=priority, hits=hits)
        if self.write_policy == "write_through" and published.length:
            table = published.pages[: published.length // self.page_size]
            self._back_up(tokens[: published.length], table, namespace, now)
        return published

    def reset(self) -> int:
        """Drop all that no lock holds, from device and host; storage keeps what it has."""
        self.host.reset()
        return super().reset()

    def take_events(self) -> list[CacheEvent]:
        """Of both tiers, each one's in order."""
        return super().take_events() + self.host.take_events()

    def snapshot(self) -> list[CacheEvent]:
        return super().snapshot() + self.host.snapshot()

    def _evicting(self, victims: list[Node], parents: list[Node], now: float) -> None:
        if self.write_policy != "write_back":
            return
        above = {id(node): parent for node, parent in zip(victims, parents, strict=True)}
        for victim in victims:
            path = [victim]
            while True:
                node = path[-1]
                parent = above.get(id(node)) or node.parent
                assert parent is not None
                if parent is self.tree.root:
                    break
                path.append(parent)
            path.reverse()
            namespace = self.tree.namespace_of(path[0])
            tokens = np.concatenate([node.tokens for node in path])
            pages = np.concatenate([node.pages for node in path])
            self._back_up(tokens, pages, namespace, now, segments_of(path))

    # --- promotion ---

    def promote(self, tokens: Tokens, namespace: str | None, *, now: float) -> Promotion | None:
        """Start to look for what lies below the device; None where nothing can."""
        if not self.enabled:
            return None
        _, on_device = self.tree.walk(tokens, namespace)
        _, on_host = self.host.tree.walk(tokens, namespace)
        held = max(on_device, on_host)
        promotion = Promotion(tokens, namespace, prefetch_deadline(tokens.size - held, now))
        if self.storage_block is not None:
            # What is fetched goes on where the host's tree ends.
            start = self._block_start(on_host)
            if self._block_start(tokens.size) > max(start, on_device):
                promotion.op = self._op()
                self._probes[promotion.op] = promotion
                self._ops.append(ProbeBlocks(promotion.op, tokens, namespace, start))
        return promotion if promotion.op is not None or on_host > on_device else None

    def ready(self, promotion: Promotion, now: float) -> bool:
        """Whether the request may be claimed now; to be asked whenever its turn has come.

        Only then is the host's part loaded: so those who wait their turn hold no device pages.
        """
        if promotion.state == "searching":
            waits = self.prefetch_policy == "wait_complete" or (
                self.prefetch_policy == "timeout" and now < promotion.deadline
            )
            if promotion.op is not None and waits:
                return False
            self._stop_fetch(promotion)  # what is still being read arrives for others
            return self._load(promotion, now)
        return promotion.state == "ready"

    def settle(self, promotion: Promotion) -> None:
        """The request has claimed its pages, or will never: what was held for it is let go."""
        promotion.settled = True
        if promotion.state == "searching":
            self._stop_fetch(promotion)
            promotion.state = "ready"
        if promotion.node is not None and promotion.state == "ready":
            self.unlock(promotion.node)
            promotion.node = None

    # --- operations ---

    def take_ops(self) -> list[TierOp]:
        """What is to be copied, in order, since the last call."""
        ops, self._ops = self._ops, []
        return ops

    def tier_event(self, event: TierEvent, now: float) -> None:
        """What has become of an operation."""
        if event.error:
            self._totals["errors"] += 1
        op = event.op
        if op in self._backups:
            self._backed_up(self._backups.pop(op), event, now)
        elif op in self._loads:
            self._loaded(self._loads.pop(op), event, now)
        elif op in self._fetches:
            self._fetched(self._fetches[op], event, now)
        elif op in self._probes:
            self._probed(self._probes.pop(op), event, now)
        else:
            pages, tokens = self._stores.pop(op)
            if not event.error:
                # Before they end their flight: until then no page stands for another prefix.
                self.host.record(StorageHolds(pages))
                self._totals["stored"] += tokens
            self.host.pool.end_flight(pages)

    @property
    def idle(self) -> bool:
        """Whether nothing is being copied."""
        return not (self._backups or self._loads or self._fetches or self._probes or self._stores)

    def take_reads(self) -> list[TierRead]:
        """How long it took to read each tier, since the last call."""
        reads, self._reads = self._reads, []
        return reads

    def tier_statistics(self) -> TierStatistics:
        return TierStatistics(**self._totals)

    def validate(self) -> None:
        """Check every invariant of both pools and trees, and of what is under way."""
        super().validate()
        self.host.validate()
        private = [backup.host.size for backup in self._backups.values()]
        private += [fetch.host.size - fetch.taken for fetch in self._fetches.values()]
        assert self.host.counts().private == sum(private)
        flying = sum(load.device.size for load in self._loads.values())
        assert self.counts().in_flight >= flying
        if self.idle:
            counts = self.host.counts()
            assert counts.private == counts.in_flight == counts.protected == 0, counts

    # --- device to host to storage ---

    def _back_up(
        self,
        tokens: Tokens,
        pages: Pages,
        namespace: str | None,
        now: float,
        evicted: list[Segment] | None = None,
    ) -> None:
        """Copies to the host what it lacks of a prefix, `pages` being all of its pages.

        With `evicted` the pages are about to be free.
        """
        size = self.page_size
        match = self.host.match(tokens, namespace, now=now, count_hit=False)
        first = max(match.length, self._coming(tokens, namespace)) // size
        missing = pages.size - first
        if missing <= 0:
            return
        self.host.lock(match.node)
        room = min(missing, self.host.available())
        if evicted is None:
            # A page that is being copied cannot be evicted: half are left to those who wait. What
            # is left out now has its turn when the prefix is next published, or hit.
            room = min(room, self.pool.num_pages // 2 - self.copying_out)
        self._totals["backups_skipped"] += (missing - room) * size
        if not room:
            self.host.unlock(match.node)
            return
        host = self.host.allocate(room, now)
        end = first + room
        device = pages[first:end].copy()
        if evicted is None:
            self.pool.begin_flight(device)
            self.copying_out += room
        op = self._op()
        self._backups[op] = Backup(
            tokens[: end * size].copy(), namespace, first, device, host, match.node, evicted
        )
        self._ops.append(CopyOut(op, device, host, now=evicted is not None))

    def _coming(self, tokens: Tokens, namespace: str | None) -> int:
        """How much of the prefix will be on the host once what is under way is there."""
        longest = 0
        for backup in self._backups.values():
            end = backup.tokens.size
            if longest < end <= tokens.size and backup.namespace == namespace:
                if np.array_equal(backup.tokens, tokens[:end]):
                    longest = end
        return longest

    def _backed_up(self, backup: Backup, event: TierEvent, now: float) -> None:
        segments = backup.segments
        if segments is None:
            self.pool.end_flight(backup.device)
            self.copying_out -= backup.device.size
            path, length = self.tree.walk(backup.tokens, backup.namespace)
            segments = segments_of(path) if length == backup.tokens.size else []
        above = self.host.match(
            backup.tokens[: backup.first * self.page_size],
            backup.namespace,
            now=now,
            count_hit=False,
        )
        if event.error or above.pages.size < backup.first:
            # The part before it is not there: evicted meanwhile, or its own copy failed.
            self.host.release(backup.host)
        else:
            table = np.concatenate([above.pages, backup.host])
            publish_segments(self.host, backup.tokens, table, backup.namespace, segments, now)
            self._totals["backed_up"] += backup.host.size * self.page_size
            self._store(backup.tokens, backup.namespace, backup.first * self.page_size, now)
        self.host.unlock(backup.host_node)

    def _store(self, tokens: Tokens, namespace: str | None, start: int, now: float) -> None:
        """Writes the whole blocks that end behind `start` to storage."""
        if self.storage_block is None:
            return
        start, end = self._block_start(start), self._block_start(tokens.size)
        if end <= start:
            return
        match = self.host.match(tokens[:end], namespace, now=now, count_hit=False)
        pages = match.pages[start // self.page_size :]
        self.host.pool.begin_flight(pages)
        op = self._op()
        self._stores[op] = (pages, end - start)
        self._ops.append(StoreBlocks(op, tokens[:end], namespace, start, pages))

    # --- storage to host to device ---

    def _probed(self, promotion: Promotion, event: TierEvent, now: float) -> None:
        if promotion.op != event.op:
            return  # it was not waited for
        promotion.op = None
        rates = self.fetch_rate.per_s, self.compute_rate.per_s
        if event.tokens and worth_loading(event.tokens, *rates):
            self._fetch(promotion, event.tokens, now)

    def _fetch(self, promotion: Promotion, found: int, now: float) -> None:
        """Reads into host pages what storage has, `found` tokens when it was asked."""
        size, tokens, namespace = self.page_size, promotion.tokens, promotion.namespace
        match = self.host.match(tokens, namespace, now=now, count_hit=False)
        # The host may have more or less than when storage was asked: reading ends where it must.
        start = self._block_start(match.length)
        self.host.lock(match.node)
        room = self._block_start(self.host.available() * size)
        end = min(self._block_start(tokens.size), start + min(found, room))
        if end <= start:
            self.host.unlock(match.node)
            return
        host = self.host.allocate((end - start) // size, now)
        op = promotion.op = self._op()
        promotion.fetched_from = match.length
        above = match.pages[: start // size]
        self._fetches[op] = Fetch(
            promotion, tokens[:end], namespace, start, above, host, match.node
        )
        self._ops.append(FetchBlocks(op, tokens[:end], namespace, start, host.copy()))

    def _fetched(self, fetch: Fetch, event: TierEvent, now: float) -> None:
        """Some more blocks are in host memory, or that was all."""
        size, promotion = self.page_size, fetch.promotion
        pages = event.tokens // size
        if pages > fetch.taken:
            table = np.concatenate([fetch.above, fetch.host[:pages]])
            end = fetch.start + pages * size
            kept = self.host.publish(fetch.tokens[:end], table, fetch.namespace, now=now)
            fetch.above = kept.pages[: fetch.start // size]
            fetch.host[:pages] = kept.pages[fetch.start // size :]
            self.host.record(StorageHolds(fetch.host[fetch.taken : pages].copy()))
            fetch.taken = pages
            self.host.move_lock(fetch.host_node, kept.node)
            fetch.host_node = kept.node
        if not event.done:
            return
        del self._fetches[event.op]
        self.fetch_rate.observe(event.tokens, event.seconds)
        self._reads.append(TierRead("storage", event.tokens, event.seconds))
        self.host.release(fetch.host[fetch.taken :])
        if promotion.op == event.op:
            promotion.op = None
        self.host.unlock(fetch.host_node)

    def _stop_fetch(self, promotion: Promotion) -> None:
        if promotion.op in self._fetches:
            self._ops.append(StopFetch(promotion.op))
        promotion.op = None

    def _load(self, promotion: Promotion, now: float) -> bool:
        """Brings up what the host has beyond the device, if that is faster than computing it.

        False while that is under way, for this request or for another with the same prefix.
        """
        tokens, namespace = promotion.tokens, promotion.namespace
        above = super().match(tokens, namespace, now=now, count_hit=False)
        below = self.host.match(tokens, namespace, now=now, count_hit=False)
        gain = below.length - above.length
        if gain <= 0 or not worth_loading(gain, self.load_rate.per_s, self.compute_rate.per_s):
            promotion.state = "ready"
            return True
        if self._loading(tokens, namespace, above.length):
            return False
        self.lock(above.node)
        self.host.lock(below.node)
        try:
            device = self.allocate(gain // self.page_size, now)
        except OutOfPages:
            self.host.unlock(below.node)
            self.unlock(above.node)
            return True  # nor are there pages to claim: it is tried again then
        self.pool.begin_flight(device)
        path, _ = self.host.tree.walk(tokens[: below.length], namespace)
        op = self._op()
        self._loads[op] = Load(
            promotion,
            tokens[: below.length],
            above.pages,
            device,
            above.node,
            below.node,
            segments_of(path),
        )
        promotion.state = "loading"
        self._ops.append(CopyIn(op, below.pages[above.pages.size :], device))
        return False

    def _loading(self, tokens: Tokens, namespace: str | None, length: int) -> bool:
        """Whether the page behind the first `length` tokens is on its way to the device."""
        end = length + self.page_size
        return any(
            load.promotion.namespace == namespace
            and load.tokens.size >= end
            and np.array_equal(load.tokens[:end], tokens[:end])
            for load in self._loads.values()
        )

    def _loaded(self, load: Load, event: TierEvent, now: float) -> None:
        size, promotion = self.page_size, load.promotion
        self.pool.end_flight(load.device)
        node = load.device_node
        if event.error:
            self.release(load.device)
        else:
            table = np.concatenate([load.above, load.device])
            kept = publish_segments(
                self, load.tokens, table, promotion.namespace, load.segments, now
            )
            self.move_lock(node, kept.node)
            node = kept.node
            gain = load.device.size * size
            start = load.tokens.size - gain
            if promotion.fetched_from is not None:
                from_storage = load.tokens.size - max(start, promotion.fetched_from)
                promotion.storage_tokens = max(0, from_storage)
            promotion.host_tokens = gain - promotion.storage_tokens
            self._totals["storage_loaded"] += promotion.storage_tokens
            self._totals["host_loaded"] += promotion.host_tokens
            self.load_rate.observe(gain, event.seconds)
            self._reads.append(TierRead("host", gain, event.seconds))
        self.host.unlock(load.host_node)
        promotion.state = "ready"
        promotion.node = node
        if promotion.settled:
            self.settle(promotion)

    def _op(self) -> int:
        self._next_op += 1
        return self._next_op

    def _block_start(self, tokens: int) -> int:
        """Where the last block begins that is not whole before `tokens` tokens."""
        return tokens - tokens % (self.storage_block or self.page_size)
