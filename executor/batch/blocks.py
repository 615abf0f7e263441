"""Paged KV block ids and the prefix cache over them. Pure: ids and tokens, no tensors.

The cache is a tree of full blocks. A node is keyed by (parent node, its tokens); the root's parent is (cache
salt, adapter digest). Node numbers are never used twice, so a hit has compared every token of the prefix, its
adapter and its salt: a hash of one prefix that equals another's cannot mix them up.

Blocks that only the cache holds are evicted least recently used first, but before all others those of
versions that are to go first: who asks for one waits for its adapter anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Root = tuple[bytes, str]
_Key = tuple[Root | int, tuple[int, ...]]


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks: `block_ids[i]` holds positions [i * block_size, (i + 1) * block_size).

    Made by `BlockPool.open` and changed by the pool alone. `num_cached` tokens came from the prefix cache.
    The first `num_committed` blocks are known to the cache, and `parent` is the node of the last of them.
    """

    parent: Root | int
    digest: str  # of the root
    block_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_committed: int = 0


class BlockPool:
    """A fixed number of KV blocks, shared by reference count.

    A block is referenced by tables, or cached and unreferenced (it can be evicted), or blank.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Cached and unreferenced, each in one of these two; ordered: the next victim first.
        self._evicted_first: dict[int, None] = {}
        self._evictable: dict[int, None] = {}
        self._nodes: dict[_Key, tuple[int, int]] = {}  # key -> (node number, block id)
        self._keys: dict[int, _Key] = {}  # block id -> its key in _nodes
        self._digest_of: dict[int, str] = {}  # block id -> its version, of cached blocks
        self._blocks_of: dict[str, dict[int, None]] = {}  # version -> its cached blocks, none empty
        self._next_node = 0

    @property
    def num_free(self) -> int:
        """Blocks that `grow` can still hand out: blank ones and those that only the cache holds."""
        return len(self._blank) + len(self._evicted_first) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self, root: Root, token_ids: Sequence[int], *, read_cache: bool = True) -> BlockTable:
        """A table that shares the longest cached prefix of `token_ids`, one token left out at least."""
        table = BlockTable(parent=root, digest=root[1])
        if not (self._prefix_cache and read_cache):
            return table
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            node = self._nodes.get((table.parent, tuple(token_ids[start : start + size])))
            if node is None:
                break
            table.parent, block_id = node
            self._reference(block_id)
            table.block_ids.append(block_id)
        table.num_committed = len(table.block_ids)
        table.num_cached = table.num_committed * size
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Give `table` blocks for its first `num_tokens` positions.

        Returns the new block ids (maybe none), or None, with nothing changed, when there are too few.
        """
        missing = max(0, self.blocks_for(num_tokens) - len(table.block_ids))
        if missing > self.num_free:
            return None
        new = [self._take() for _ in range(missing)]
        table.block_ids += new
        return new

    def commit(self, table: BlockTable, token_ids: Sequence[int], computed: int) -> None:
        """Offer to the cache every full block of the first `computed` tokens of `table`."""
        if not self._prefix_cache:
            return
        for index in range(table.num_committed, computed // self.block_size):
            start = index * self.block_size
            key = (table.parent, tuple(token_ids[start : start + self.block_size]))
            # Another sequence computed the same: it stays the cached one, and the chain goes on behind it.
            node = self._nodes.get(key) or self._enter(key, table.block_ids[index], table.digest)
            table.parent = node[0]
            table.num_committed = index + 1

    def close(self, table: BlockTable) -> None:
        """Give all blocks back. Cached ones can be found until evicted, the end of a prefix first."""
        for block_id in reversed(table.block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if block_id in self._keys:
                    self._evictable[block_id] = None
                else:
                    self._blank.append(block_id)
        table.block_ids = []

    def evict_first(self, digest: str) -> None:
        """What the cache alone holds of this version goes before all others', until it is used again."""
        for block_id in reversed(self._blocks_of.get(digest, {})):
            if block_id in self._evictable:
                del self._evictable[block_id]
                self._evicted_first[block_id] = None

    def _reference(self, block_id: int) -> None:
        self._evictable.pop(block_id, None)
        self._evicted_first.pop(block_id, None)
        self._references[block_id] += 1

    def _take(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            victims = self._evicted_first or self._evictable
            block_id = next(iter(victims))
            del victims[block_id]
            self._leave(block_id)
        self._references[block_id] = 1
        return block_id

    def _enter(self, key: _Key, block_id: int, digest: str) -> tuple[int, int]:
        node = (self._next_node, block_id)
        self._next_node += 1
        self._nodes[key] = node
        self._keys[block_id] = key
        self._digest_of[block_id] = digest
        self._blocks_of.setdefault(digest, {})[block_id] = None
        return node

    def _leave(self, block_id: int) -> None:
        """It is in the cache no more."""
        del self._nodes[self._keys.pop(block_id)]
        digest = self._digest_of.pop(block_id)
        blocks = self._blocks_of[digest]
        del blocks[block_id]
        if not blocks:
            del self._blocks_of[digest]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError unless the books balance, given every open table."""
        used = [0] * self.num_blocks
        for table in tables:
            for block_id in table.block_ids:
                used[block_id] += 1
        idle = [block_id for block_id in range(self.num_blocks) if used[block_id] == 0]
        balanced = (
            used == self._references
            and sorted([*self._blank, *self._evicted_first, *self._evictable]) == idle
            and all(block_id in self._keys for block_id in (*self._evicted_first, *self._evictable))
            and not any(block_id in self._keys for block_id in self._blank)
            and {block_id: key for key, (_, block_id) in self._nodes.items()} == self._keys
            and self._digest_of.keys() == self._keys.keys()
            and {block: digest for digest, ids in self._blocks_of.items() for block in ids} == self._digest_of
        )
        if not balanced:
            raise RuntimeError(f"KV blocks out of balance: used {used}, counted {self._references}")
