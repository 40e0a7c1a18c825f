"""The log's arithmetic against published vectors, and every proof against every forged one."""

from __future__ import annotations

import pytest

from mok_service.provenance import merkle

# The vectors of the certificate-transparency reference implementation (RFC 6962): eight entries, the root after each.
ENTRIES = [bytes.fromhex(h) for h in (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f",
)]  # fmt: skip
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
LEAVES = [merkle.leaf_hash(entry) for entry in ENTRIES]


def test_published_roots() -> None:
    assert merkle.root([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert [merkle.root(LEAVES[:n]).hex() for n in range(1, 9)] == ROOTS


def test_a_tree_grows_by_its_frontier() -> None:
    tree, frontier = leaves(70), list[bytes]()
    assert merkle.frontier_root([]) == merkle.root([])
    for size, leaf in enumerate(tree):
        frontier = merkle.grown(frontier, size, leaf)
        assert merkle.frontier_root(frontier) == merkle.root(tree[: size + 1])
        assert len(frontier) == (size + 1).bit_count()


def test_published_proofs() -> None:
    assert [h.hex() for h in merkle.inclusion_proof(5, LEAVES)] == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert [h.hex() for h in merkle.consistency_proof(6, LEAVES)] == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


def leaves(count: int) -> list[bytes]:
    return [merkle.leaf_hash(str(i).encode()) for i in range(count)]


@pytest.mark.parametrize("size", [*range(1, 20), 33, 64, 65])
def test_inclusion(size: int) -> None:
    tree = leaves(size)
    head = merkle.root(tree)
    for index, leaf in enumerate(tree):
        proof = merkle.inclusion_proof(index, tree)
        assert merkle.verify_inclusion(leaf, index, size, proof, head)
        assert not merkle.verify_inclusion(merkle.leaf_hash(b"forged"), index, size, proof, head)
        assert not merkle.verify_inclusion(leaf, index, size, [*proof, head], head)
        if proof:
            assert not merkle.verify_inclusion(leaf, index, size, proof[:-1], head)
            assert not merkle.verify_inclusion(leaf, (index + 1) % size, size, proof, head)
    assert not merkle.verify_inclusion(tree[0], size, size, [], head)


@pytest.mark.parametrize("size", [*range(1, 20), 33])
def test_consistency(size: int) -> None:
    tree = leaves(size)
    head = merkle.root(tree)
    for old in range(size + 1):
        proof = merkle.consistency_proof(old, tree)
        before = merkle.root(tree[:old])
        assert merkle.verify_consistency(old, size, proof, before, head)
        if old:
            changed = merkle.root([merkle.leaf_hash(b"rewritten"), *tree[1:old]])
            assert not merkle.verify_consistency(old, size, proof, changed, head)
        if 0 < old < size:
            assert not merkle.verify_consistency(old, size, proof[:-1], before, head)
            assert not merkle.verify_consistency(old, size, proof, before, merkle.root([*tree[:-1], b"\0" * 32]))


def test_sizes_out_of_range() -> None:
    with pytest.raises(ValueError, match="entry 3 of a log with 3 entries; allowed: 0 to 2"):
        merkle.inclusion_proof(3, leaves(3))
    with pytest.raises(ValueError, match="old size 4 of a log with 3 entries; allowed: 0 to 3"):
        merkle.consistency_proof(4, leaves(3))
