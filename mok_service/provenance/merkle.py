"""The append-only log's arithmetic: Merkle tree hashes, inclusion and consistency proofs by RFC 6962 (section 2.1). No I/O.

Leaves and nodes are hashed with different prefixes (0x00, 0x01), so a node can't pass for an entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """SHA-256(0x00 || entry), 32 bytes."""
    return hashlib.sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 || left || right), 32 bytes."""
    return hashlib.sha256(b"\1" + left + right).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The tree head over leaf hashes."""
    if not leaves:
        return EMPTY_ROOT
    if len(leaves) == 1:
        return leaves[0]
    split = _split(len(leaves))
    return node_hash(root(leaves[:split]), root(leaves[split:]))


def grown(frontier: Sequence[bytes], size: int, leaf: bytes) -> list[bytes]:
    """The frontier of a tree of `size` entries once `leaf` is added: the roots of its full subtrees, the largest first."""
    roots = [*frontier, leaf]
    while size & 1:
        right, left = roots.pop(), roots.pop()
        roots.append(node_hash(left, right))
        size >>= 1
    return roots


def frontier_root(frontier: Sequence[bytes]) -> bytes:
    """The tree head by its frontier: what `root` gives for all the leaves."""
    if not frontier:
        return EMPTY_ROOT
    value = frontier[-1]
    for left in reversed(frontier[:-1]):
        value = node_hash(left, value)
    return value


def inclusion_path(index: int, size: int) -> list[range]:
    """The entries under each hash of the proof that entry `index` is in the tree of `size` entries, in the proof's order.

    Raises ValueError when there is no such entry.
    """
    if not 0 <= index < size:
        raise ValueError(f"entry {index} of a log with {size} entries; allowed: 0 to {size - 1}")
    path, entries = list[range](), range(size)
    while len(entries) > 1:
        left, right = _halves(entries)
        entries, sibling = (left, right) if index in left else (right, left)
        path.append(sibling)
    return path[::-1]


def consistency_path(old_size: int, size: int) -> list[range]:
    """The same for the proof that the tree of `size` entries begins with the tree of `old_size`. Raises ValueError for a size
    out of range."""
    if not 0 <= old_size <= size:
        raise ValueError(f"old size {old_size} of a log with {size} entries; allowed: 0 to {size}")
    if old_size in (0, size):
        return []
    path, entries = list[range](), range(size)
    while entries.stop != old_size:
        left, right = _halves(entries)
        entries, sibling = (left, right) if old_size <= left.stop else (right, left)
        path.append(sibling)
    return ([] if entries.start == 0 else [entries]) + path[::-1]


def full_subtrees(entries: range) -> list[range]:
    """The full subtrees that a path's range of entries is made of, the largest first."""
    parts, start = [], entries.start
    while start < entries.stop:
        count = 1 << (entries.stop - start).bit_length() - 1
        parts.append(range(start, start + count))
        start += count
    return parts


def last_subtree(leaf: bytes, frontier: Sequence[bytes], count: int) -> bytes:
    """The root of the full subtree over the last `count` entries (a power of two) of a tree: `leaf` is its last leaf, `frontier`
    that of the tree without it."""
    value = leaf
    for left in reversed(frontier[len(frontier) - (count.bit_length() - 1):]):
        value = node_hash(left, value)
    return value


def inclusion_proof(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """The audit path of leaf `index` in the tree over `leaves`. Raises ValueError when there is no such leaf."""
    return [root(leaves[part.start:part.stop]) for part in inclusion_path(index, len(leaves))]


def consistency_proof(old_size: int, leaves: Sequence[bytes]) -> list[bytes]:
    """That the tree over `leaves` begins with the tree of `old_size` entries. Raises ValueError for a size out of range."""
    return [root(leaves[part.start:part.stop]) for part in consistency_path(old_size, len(leaves))]


def _halves(entries: range) -> tuple[range, range]:
    middle = entries.start + _split(len(entries))
    return range(entries.start, middle), range(middle, entries.stop)


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], head: bytes) -> bool:
    """Whether `proof` shows that leaf hash `leaf` is entry `index` of the tree of `size` entries with root `head`."""
    if not 0 <= index < size:
        return False
    position, last, value = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if position & 1 or position == last:
            value = node_hash(sibling, value)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            value = node_hash(value, sibling)
        position, last = position >> 1, last >> 1
    return last == 0 and value == head


def verify_consistency(old_size: int, new_size: int, proof: Sequence[bytes], old_head: bytes, new_head: bytes) -> bool:
    """Whether `proof` shows that the tree of `new_size` entries begins with that of `old_size` entries."""
    if not 0 <= old_size <= new_size:
        return False
    if old_size == new_size:
        return not proof and old_head == new_head
    if old_size == 0:
        return not proof and old_head == EMPTY_ROOT
    path = list(proof)
    if old_size & (old_size - 1) == 0:
        path.insert(0, old_head)
    if not path:
        return False
    position, last = old_size - 1, new_size - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old_value = new_value = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            old_value, new_value = node_hash(sibling, old_value), node_hash(sibling, new_value)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            new_value = node_hash(new_value, sibling)
        position, last = position >> 1, last >> 1
    return last == 0 and old_value == old_head and new_value == new_head


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1
