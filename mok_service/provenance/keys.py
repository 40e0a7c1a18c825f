"""Signing keys: Ed25519, kept in a file that only its owner can read, and files of trusted public keys."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from mok_service.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key; `id` is the SHA-256 of its SubjectPublicKeyInfo (DER), 64 hex digits."""

    key: Ed25519PublicKey

    @property
    def id(self) -> str:
        return hashlib.sha256(self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()

    @property
    def pem(self) -> str:
        return self.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        try:
            self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """An Ed25519 private key."""

    key: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self.key.sign(message)


def signing_key(path: Path) -> SigningKey:
    """The key in `path`, made there on first use (mode 0600).

    Raises InvalidSpec for a file that others can read, or that holds no Ed25519 key.
    """
    if not path.exists():
        _make(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InvalidSpec(f"the signing key {path.name} has mode {mode:04o}; allowed: 0600 (others must not read it)")
    return SigningKey(_load_private(path))


def _make(path: Path) -> None:
    """A new key in `path`; one that another process has put there meanwhile stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pem = SigningKey.generate().key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a process id may come again after a crash
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()


def public_keys(path: Path) -> dict[str, PublicKey]:
    """The trusted keys in a file: one or more PEM public keys one after the other, by their ids.

    Raises InvalidSpec when the file holds none, or something else.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise InvalidSpec(f"the key file {path} can't be read: {error.strerror}") from None
    return public_keys_of(text, path.name)


def public_keys_of(text: str, name: str) -> dict[str, PublicKey]:
    """The keys in a text of PEM blocks, by their ids; `name` says where it is from. Raises as `public_keys` does."""
    end = "-----END PUBLIC KEY-----"
    blocks = [block + end for block in text.split(end) if "BEGIN PUBLIC KEY" in block]
    keys = [_load_public(block.encode(), name) for block in blocks]
    if not keys:
        raise InvalidSpec(f"{name} holds no public key; allowed: Ed25519 public keys in PEM, one after the other")
    return {key.id: key for key in keys}


def write_public_keys(path: Path, keys: Iterable[PublicKey]) -> None:
    path.write_text("".join(key.pem for key in keys))


def _load_public(pem: bytes, name: str) -> PublicKey:
    try:
        key = load_pem_public_key(pem)
    except ValueError as error:
        raise InvalidSpec(f"{name} holds something that is no public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidSpec(f"{name} holds a key of type {type(key).__name__}; allowed: Ed25519")
    return PublicKey(key)


def _load_private(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise InvalidSpec(f"the signing key {path.name} can't be read: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidSpec(f"the signing key {path.name} is of type {type(key).__name__}; allowed: Ed25519")
    return key
