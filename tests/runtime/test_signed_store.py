"""Signed messages: what another client of the store can do with them."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from megabench.errors import UserError
from megabench.runtime.signed_store import SECRET_NAME, SignedStore, agree_on_key, shared_secret

KEY = b"the key of this launch"


@pytest.fixture
def raw() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    return store


def test_a_signed_value_is_read_back(raw):
    signed = SignedStore(raw, KEY, "run")
    signed.set("plan", '{"a": "ü"}')
    assert SignedStore(raw, KEY, "run").get("plan") == '{"a": "ü"}'.encode()
    assert signed.check(["plan"]) and not signed.check(["plan", "other"])
    assert raw.get("run/plan") != signed.get("plan")


def test_what_others_write_counts_as_absent(raw):
    signed, stranger = SignedStore(raw, KEY, "run"), SignedStore(raw, b"another key", "run")
    raw.set("run/unsigned", "yes")
    stranger.set("wrong-key", "yes")
    signed.set("plan", "yes")
    raw.set("run/replayed", raw.get("run/plan"))  # a valid message under another key
    raw.set("other/plan", raw.get("run/plan"))  # and of another trial
    for key in ("unsigned", "wrong-key", "replayed"):
        assert not signed.check([key]), key
    assert not signed.with_prefix("other").check(["plan"]) and signed.check(["plan"])


def test_the_first_signed_reason_counts(raw):
    signed = SignedStore(raw, KEY)
    raw.set("stopped", "a stranger says so")
    assert signed.compare_set("stopped", "", "first") == b"first"
    assert signed.compare_set("stopped", "", "second") == b"first"


def test_a_trial_has_a_key_of_its_own(raw):
    launch = SignedStore(raw, KEY)
    trial = SignedStore(raw, launch.secret_of("task/1").encode(), "task/1")
    trial.set("failure/0", "out of memory")
    assert launch.with_secret_of("task/1").get("failure/0") == b"out of memory"
    assert not launch.with_secret_of("task/2").check(["failure/0"])


def agreed(stores: list[HashStore], secrets: list[str], seconds: float = 60.0) -> list[object]:
    results: list[object] = [None] * len(stores)

    def agree(rank: int) -> None:
        try:
            results[rank] = agree_on_key(stores[rank], secrets[rank], rank, len(stores), timedelta(seconds=seconds))
        except UserError as error:
            results[rank] = error

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_agree_on_a_new_key(raw):
    first = agreed([raw] * 3, ["secret"] * 3)
    assert len(set(first)) == 1 and isinstance(first[0], bytes)
    assert set(agreed([HashStore()] * 3, ["secret"] * 3)) != set(first)


def test_a_replayed_session_is_refused():
    """The other rank must not accept the session of an earlier launch, although it was signed with the secret."""
    old = HashStore()
    agreed([old] * 2, ["secret"] * 2)
    new = HashStore()
    new.set("signing/session", old.get("signing/session").decode())
    with pytest.raises(UserError, match="the ranks have not agreed on a signing key within 1 s; set MEGABENCH_STORE"):
        agree_on_key(new, "secret", 1, 2, timedelta(seconds=1))


def test_another_secret_is_an_error(raw):
    advice = "set MEGABENCH_STORE_SECRET to the same value on every host"
    lead, *others = map(str, agreed([raw] * 3, ["secret", "secret", "another"]))
    assert lead == f"rank 2 has another MEGABENCH_STORE_SECRET than rank 0; {advice}"
    assert others == [f"MEGABENCH_STORE_SECRET differs between hosts; {advice}"] * 2


def test_the_shared_secret_is_a_private_file(tmp_path):
    secret = shared_secret(tmp_path / "out", is_lead=True)
    path = tmp_path / "out" / SECRET_NAME
    assert len(secret) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert shared_secret(tmp_path / "out", is_lead=True) == shared_secret(tmp_path / "out", is_lead=False) == secret
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"can be read by other users; use chmod 600, or set MEGABENCH_STORE_SECRET"):
        shared_secret(tmp_path / "out", is_lead=False)


def test_hosts_must_share_the_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("megabench.runtime.signed_store._SHARED_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"cannot be read .*; use an --out directory that all hosts share, or set MEG"):
        shared_secret(tmp_path, is_lead=False)
