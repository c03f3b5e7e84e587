"""A store whose messages are signed, so that other clients of the store cannot forge them.

Anyone who reaches a launch's port can change the keys of its store. With a secret (MEGABENCH_STORE_SECRET), messages of
megabench carry an HMAC over their key and value, and messages with a wrong HMAC count as absent. The signing key is new
for every launch, so messages of earlier launches are invalid. Messages of torch's process groups are not signed.
"""

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from megabench.errors import UserError

SECRET_VARIABLE = "MEGABENCH_STORE_SECRET"
SECRET_NAME = ".store-secret"
_SHARED_SECONDS = 60.0  # time limit for a new file to appear on other hosts
_SIZE = hashlib.sha256().digest_size
_POLL_SECONDS = 0.05
_NOTICE_SECONDS = 1.0  # for other ranks to read why rank 0 ends, before the store of rank 0 ends


class SignedStore(Store):
    """Signs the values that this process sets in `store`, and ignores values that were not signed with `key`.

    `prefix` precedes all keys, in the store and in the signatures. Counters (`add`) are not signed.
    """

    def __init__(self, store: Store, key: bytes, prefix: str = "") -> None:
        super().__init__()
        self._base, self._key, self._prefix = store, key, prefix
        self._store = PrefixStore(prefix, store) if prefix else store

    def with_prefix(self, prefix: str) -> "SignedStore":
        """Return the same store with `prefix` instead of this store's prefix."""
        return SignedStore(self._base, self._key, prefix)

    def clone(self) -> "SignedStore":
        return SignedStore(self._base.clone(), self._key, self._prefix)  # type: ignore[attr-defined, unused-ignore]

    def secret_of(self, prefix: str) -> str:
        """Return a secret for processes that use only keys with `prefix`."""
        return hmac.digest(self._key, f"key {prefix}".encode(), "sha256").hex()

    def with_secret_of(self, prefix: str) -> "SignedStore":
        """Return the store that such processes see."""
        return SignedStore(self._base, self.secret_of(prefix).encode(), prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        while (value := self._opened(key, self._store.get(key))) is None:
            time.sleep(_POLL_SECONDS)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys)) and None not in self._values(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [value or b"" for value in self._values(keys)]

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(minutes=10)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no signed message under {', '.join(keys)}")
            time.sleep(_POLL_SECONDS)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if it has no signed value yet, and return its value. `expected` must be empty."""
        assert expected == ""
        signed = self._signed(key, desired)
        value = self._opened(key, self._store.compare_set(key, "", signed))
        if value is None:
            self._store.set(key, signed)
        return desired.encode() if value is None else value

    def _values(self, keys: Sequence[str]) -> list[bytes | None]:
        found = self._store.multi_get(list(keys)) if keys else []
        return [self._opened(key, value) for key, value in zip(keys, found, strict=True)]

    def _signed(self, key: str, value: str | bytes) -> str:
        text = value if isinstance(value, str) else value.decode()
        return self._signature(key, text.encode()) + text

    def _opened(self, key: str, value: bytes) -> bytes | None:
        """Return the value without its signature, or None if the signature is wrong."""
        content = value[2 * _SIZE :]
        is_valid = hmac.compare_digest(self._signature(key, content).encode(), value[: 2 * _SIZE])
        return content if is_valid else None

    def _signature(self, key: str, content: bytes) -> str:
        return hmac.new(self._key, f"{self._prefix}/{key}".encode() + b"\0" + content, "sha256").hexdigest()


def with_prefix(store: TCPStore | SignedStore, prefix: str) -> Store:
    """Return a store for keys with `prefix`, which is signed if `store` is signed."""
    return store.with_prefix(prefix) if isinstance(store, SignedStore) else PrefixStore(prefix, store)


def agree_on_key(store: Store, secret: str, rank: int, world_size: int, timeout: timedelta) -> bytes:
    """Return a signing key that is new for this launch. All ranks must call this function.

    Every rank publishes a random challenge, and rank 0 publishes a random session with all challenges, both signed with
    the secret. A session of an earlier launch lacks this launch's challenges.

    Raises UserError on every rank if one rank has another secret than rank 0.
    """
    challenge = secrets.token_hex(16)
    signed = SignedStore(store, secret.encode(), "signing")
    signed.set(f"challenge/{rank}", challenge)
    differ, advice = "signing/secrets-differ", f"set {SECRET_VARIABLE} to the same value on every host"
    if rank == 0:
        keys = [f"challenge/{other}" for other in range(world_size)]
        store.wait([f"signing/{key}" for key in keys], timeout)
        challenges = [value.decode() for value in signed.multi_get(keys)]
        if "" in challenges:
            store.set(differ, "yes")
            time.sleep(_NOTICE_SECONDS)
            raise UserError(f"rank {challenges.index('')} has another {SECRET_VARIABLE} than rank 0; {advice}")
        signed.set("session", json.dumps({"session": secrets.token_hex(32), "challenges": challenges}))
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if signed.check(["session"]):
            content = json.loads(signed.get("session"))
            if content["challenges"][rank] == challenge:
                return hmac.digest(secret.encode(), content["session"].encode(), "sha256")
        if store.check([differ]):
            raise UserError(f"{SECRET_VARIABLE} differs between hosts; {advice}")
        time.sleep(_POLL_SECONDS)
    raise UserError(f"the ranks have not agreed on a signing key within {timeout.total_seconds():.0f} s; {advice}")


def secret_from_environment() -> str | None:
    return os.environ.get(SECRET_VARIABLE) or None


def shared_secret(folder: Path, is_lead: bool) -> str:
    """Return the secret in a file of `folder`, which the lead creates for all hosts that share the folder.

    Raises UserError if the file does not appear, or if other users may read it.
    """
    path, advice = folder / SECRET_NAME, f"set {SECRET_VARIABLE} to the same value on every host"
    try:
        if is_lead:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(secrets.token_hex(32))
        deadline = time.monotonic() + _SHARED_SECONDS
        while not (path.exists() and path.stat().st_size == 64) and time.monotonic() < deadline:
            time.sleep(0.5)
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path} can be read by other users; use chmod 600, or {advice}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
        raise UserError(f"{reason}; use an --out directory that all hosts share, or {advice}") from None
