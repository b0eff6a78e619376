"""What a prefix cache tells an index of who holds what.

Pages name positions in the tree: while a page is stored it stands for one prefix, whatever splits
happen, so the index needs to know nothing of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pd_cluster.cache.node import Tokens
from pd_cluster.cache.page_pool import Pages


@dataclass(frozen=True, slots=True, eq=False)
class PagesStored:
    """A run of tokens was cached after the prefix that ends with page `parent` (None: at the top).

    `tokens` fill `pages` exactly.
    """

    namespace: str | None
    parent: int | None
    tokens: Tokens
    pages: Pages


@dataclass(frozen=True, slots=True, eq=False)
class PagesRemoved:
    """These pages no longer stand for a prefix."""

    pages: Pages


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """Nothing is cached any more."""


CacheEvent: TypeAlias = PagesStored | PagesRemoved | PagesCleared
