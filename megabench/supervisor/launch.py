"""The launch of a study: the ranks of this supervisor, and the store that all supervisors share."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from megabench.errors import UserError
from megabench.runtime import rendezvous
from megabench.runtime.launcher import local_world_size_from_environment
from megabench.runtime.signed_store import SignedStore, secret_from_environment, shared_secret


@dataclass(frozen=True)
class Launch:
    """The launch as one supervisor sees it.

    The supervisor manages `ranks`, and the first rank of this host is `first_on_host`.

    `store` (at `address`:`port`) exists for the whole study. All keys of this launch have the prefix `root`. The
    messages of a launch on several hosts are signed.
    """

    store: TCPStore | SignedStore
    address: str
    port: int
    root: str
    ranks: tuple[int, ...]
    first_on_host: int
    num_on_host: int
    supervisors: tuple[int, ...]

    @property
    def supervisor(self) -> int:
        """The number of this supervisor, which is its first rank."""
        return self.ranks[0]

    @property
    def is_lead(self) -> bool:
        """Whether this is the lead supervisor, which makes decisions and reads and writes the results."""
        return self.supervisor == 0

    def placement_variables(self, rank: int, world_size: int) -> dict[str, str]:
        """Return the launcher's environment variables for `rank` in a trial of `world_size` ranks."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank - self.first_on_host),
            "LOCAL_WORLD_SIZE": str(min(self.num_on_host, world_size - self.first_on_host)),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def open_here(num_processes: int) -> Launch:
    """Create a launch on this machine. This process hosts the store and manages all ranks."""
    store = rendezvous.open_store()
    ranks = tuple(range(num_processes))
    return Launch(store, rendezvous.LOOPBACK, store.port, "study/0", ranks, 0, num_processes, (0,))


def join_launcher(out: Path) -> Launch:
    """Join a launch by torchrun, in which each process supervises one rank.

    The messages between hosts are signed, with a secret from the environment or from a file in the shared `out`.
    """
    has_other_hosts = local_world_size_from_environment() < rendezvous.world_size_from_environment()
    secret = secret_from_environment()
    if has_other_hosts and not secret:
        rank = rendezvous.rank_from_environment()
        try:
            secret = shared_secret(out, is_lead=rank == 0)
        except UserError as error:
            if rank > 0:  # usually only rank 0 prints errors, but this one may concern a single host
                print(f"Error: {error}", file=sys.stderr, flush=True)
            raise
    return launch_of(rendezvous.join(secret=secret))


def launch_of(place: rendezvous.Rendezvous) -> Launch:
    """Return the launch of `place`, with this process as the supervisor of its own rank."""
    base = place.base or place.store
    store = base.underlying_store if isinstance(base, PrefixStore) else base
    assert isinstance(store, TCPStore)
    return Launch(
        store=place.store.with_prefix("") if isinstance(place.store, SignedStore) else store,
        address=store.host,
        port=store.port,
        root=f"study/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        ranks=(place.rank,),
        first_on_host=place.rank - place.local_rank,
        num_on_host=place.local_world_size,
        supervisors=tuple(range(place.world_size)),
    )
