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


def inclusion_proof(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """The audit path of leaf `index` in the tree over `leaves`. Raises ValueError when there is no such leaf."""
    if not 0 <= index < len(leaves):
        raise ValueError(f"entry {index} of a log with {len(leaves)} entries; allowed: 0 to {len(leaves) - 1}")
    if len(leaves) == 1:
        return []
    split = _split(len(leaves))
    if index < split:
        return [*inclusion_proof(index, leaves[:split]), root(leaves[split:])]
    return [*inclusion_proof(index - split, leaves[split:]), root(leaves[:split])]


def consistency_proof(old_size: int, leaves: Sequence[bytes]) -> list[bytes]:
    """That the tree over `leaves` begins with the tree of `old_size` entries. Raises ValueError for a size out of range."""
    if not 0 <= old_size <= len(leaves):
        raise ValueError(f"old size {old_size} of a log with {len(leaves)} entries; allowed: 0 to {len(leaves)}")
    if old_size in (0, len(leaves)):
        return []
    return _subproof(old_size, leaves, True)


def _subproof(old_size: int, leaves: Sequence[bytes], whole: bool) -> list[bytes]:
    if old_size == len(leaves):
        return [] if whole else [root(leaves)]
    split = _split(len(leaves))
    if old_size <= split:
        return [*_subproof(old_size, leaves[:split], whole), root(leaves[split:])]
    return [*_subproof(old_size - split, leaves[split:], False), root(leaves[:split])]


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
