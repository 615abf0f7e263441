import pytest

from executor.batch.blocks import BlockPool, BlockTable, Root

BASE: Root = (b"", "")


def fill(pool: BlockPool, root: Root, tokens: list[int]) -> BlockTable:
    table = pool.open(root, tokens)
    assert pool.grow(table, len(tokens)) is not None
    pool.commit(table, tokens, len(tokens))
    return table


def test_grow_returns_none_and_changes_nothing_when_blocks_run_out() -> None:
    pool = BlockPool(3, 4)
    table = pool.open(BASE, [])
    assert pool.grow(table, 8) == [0, 1]
    other = pool.open(BASE, [])
    assert pool.grow(other, 8) is None
    assert other.block_ids == []
    assert pool.grow(other, 4) == [2]
    assert pool.grow(table, 8) == []
    pool.check([table, other])


def test_a_full_prompt_hit_leaves_the_last_block_to_compute() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(8))
    first = fill(pool, BASE, tokens)
    again = pool.open(BASE, tokens)
    assert again.num_cached == 4
    assert again.block_ids == first.block_ids[:1]
    longer = pool.open(BASE, [*tokens, 9])
    assert longer.num_cached == 8
    pool.check([first, again, longer])


@pytest.mark.parametrize("root", [(b"other", ""), (b"", "sha256:a")])
def test_prefixes_are_shared_within_one_salt_and_adapter_only(root: Root) -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(9))
    fill(pool, BASE, tokens)
    assert pool.open(root, tokens).num_cached == 0
    assert pool.open(BASE, tokens).num_cached == 8


def test_equal_hashes_do_not_make_a_hit() -> None:
    pool = BlockPool(8, 1)
    assert hash(-1) == hash(-2)
    fill(pool, BASE, [-1, 5])
    assert pool.open(BASE, [-2, 5]).num_cached == 0


def test_a_block_under_another_parent_is_not_a_hit() -> None:
    pool = BlockPool(8, 2)
    fill(pool, BASE, [1, 1, 7, 7])
    table = pool.open(BASE, [2, 2, 7, 7, 0])
    assert table.num_cached == 0


def test_partial_blocks_and_uncommitted_tokens_are_not_shared() -> None:
    pool = BlockPool(8, 4)
    table = pool.open(BASE, list(range(8)))
    pool.grow(table, 8)
    pool.commit(table, list(range(8)), 7)
    assert pool.open(BASE, list(range(12))).num_cached == 4


def test_eviction_takes_the_least_recently_used_prefix_from_its_end() -> None:
    pool = BlockPool(4, 2)
    old, new = list(range(4)), list(range(10, 14))
    pool.close(fill(pool, BASE, old))
    pool.close(fill(pool, BASE, new))
    assert pool.num_free == 4
    table = pool.open(BASE, [99])
    pool.grow(table, 2)
    assert pool.open(BASE, [*old, 0]).num_cached == 2
    assert pool.open(BASE, [*new, 0]).num_cached == 4


def test_a_version_that_is_to_go_first_is_evicted_before_older_ones_from_its_end() -> None:
    pool = BlockPool(6, 2)
    old, gone = (b"", "old"), (b"salt", "gone")
    tokens = list(range(4))
    pool.close(fill(pool, old, tokens))
    pool.close(fill(pool, gone, tokens))
    pool.evict_first("gone")
    pool.evict_first("unknown")
    assert pool.num_free == 6
    table = pool.open(BASE, [99])
    pool.grow(table, 6)  # two are blank
    pool.check([table])
    assert pool.open(gone, [*tokens, 0]).num_cached == 2
    assert pool.open(old, [*tokens, 0]).num_cached == 4


def test_what_is_used_again_goes_first_no_more() -> None:
    pool = BlockPool(4, 2)
    back, other = (b"", "back"), (b"", "other")
    tokens = list(range(4))
    running = fill(pool, back, tokens)
    pool.evict_first("back")  # nothing of it is evictable yet
    pool.close(running)
    pool.close(fill(pool, other, tokens))
    pool.evict_first("other")
    pool.close(again := pool.open(other, [*tokens, 0]))
    pool.check([again])
    table = pool.open(BASE, [99])
    pool.grow(table, 4)
    assert pool.open(back, [*tokens, 0]).num_cached == 0
    assert pool.open(other, [*tokens, 0]).num_cached == 4


def test_two_computing_the_same_prefix_keep_one_cached_copy() -> None:
    pool = BlockPool(8, 2)
    tokens = [1, 2, 3, 4]
    tables = [pool.open(BASE, tokens) for _ in range(2)]
    for table in tables:
        pool.grow(table, 4)
        pool.commit(table, tokens, len(tokens))
    assert pool.open(BASE, [*tokens, 5]).block_ids == tables[0].block_ids
    for table in tables:
        pool.close(table)


def test_reading_the_cache_can_be_refused() -> None:
    pool = BlockPool(8, 2)
    fill(pool, BASE, [1, 2, 3])
    assert pool.open(BASE, [1, 2, 3], read_cache=False).num_cached == 0
    off = BlockPool(8, 2, prefix_cache=False)
    fill(off, BASE, [1, 2, 3])
    assert off.open(BASE, [1, 2, 3]).num_cached == 0


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(2, 2)
    table = fill(pool, BASE, [1, 2])
    with pytest.raises(RuntimeError, match="balance"):
        pool.check([])
    pool.check([table])
