"""Signing keys: made once, readable by their owner alone; and files of trusted keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from mok_service.errors import InvalidSpec
from mok_service.provenance.keys import SigningKey, public_keys, signing_key, write_public_keys

ROOT = Path(__file__).parents[2]
MAKE = """
import sys
from pathlib import Path
from mok_service.provenance.keys import signing_key
print("ready", flush=True)
sys.stdin.readline()
print(signing_key(Path(sys.argv[1])).public.id)
"""


def test_a_key_is_made_on_first_use_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "signing.pem"
    made = signing_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert signing_key(path).public.id == made.public.id
    assert made.public.verifies(signing_key(path).sign(b"x"), b"x") and not made.public.verifies(made.sign(b"x"), b"y")
    assert [file.name for file in path.parent.iterdir()] == ["signing.pem"], "nothing is left of the making"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "signing.pem"
    signing_key(path)
    path.chmod(mode)
    with pytest.raises(InvalidSpec, match=rf"signing\.pem has mode {mode:04o}; allowed: 0600"):
        signing_key(path)


def test_many_processes_make_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "signing.pem"
    processes = [
        subprocess.Popen([sys.executable, "-c", MAKE, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True)
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ids = {process.communicate(timeout=60)[0] for process in processes}
    assert ids == {signing_key(path).public.id + "\n"}
    assert all(process.returncode == 0 for process in processes)
    assert [file.name for file in path.parent.iterdir()] == ["signing.pem"]


def test_a_file_that_holds_no_ed25519_key_is_refused(tmp_path: Path) -> None:
    other = generate_private_key(SECP256R1())
    contents = {
        "can't be read": b"nothing",
        "is of type": other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for message, content in contents.items():
        path = tmp_path / "signing.pem"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(InvalidSpec, match=message):
            signing_key(path)


def test_trusted_keys_are_read_from_one_file(tmp_path: Path) -> None:
    path, keys = tmp_path / "trusted.pem", [SigningKey.generate().public for _ in range(3)]
    write_public_keys(path, keys)
    assert {key_id: key.pem for key_id, key in public_keys(path).items()} == {key.id: key.pem for key in keys}
    other = generate_private_key(SECP256R1()).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    broken = keys[0].pem.replace("M", "A", 1)
    nothing = "no public key"
    for content, message in {"": nothing, "x" * 99: nothing, broken: nothing, other: "allowed: Ed25519"}.items():
        path.write_text(content)
        with pytest.raises(InvalidSpec, match=message):
            public_keys(path)
