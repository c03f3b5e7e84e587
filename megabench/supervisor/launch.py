"""The launch of a study: the ranks of this supervisor, and the store that all supervisors share."""

import os
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store, TCPStore

from megabench.runtime import rendezvous


@dataclass(frozen=True)
class Launch:
    """The launch as one supervisor sees it.

    The supervisor manages `ranks`, and the first rank of this host is `first_on_host`.

    `store` (at `address`:`port`) exists for the whole study. All keys of this launch have the prefix `root`.
    """

    store: Store
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


def join_launcher() -> Launch:
    """Join a launch by torchrun, in which each process supervises one rank."""
    return launch_of(rendezvous.join())


def launch_of(place: rendezvous.Rendezvous) -> Launch:
    """Return the launch of `place`, with this process as the supervisor of its own rank."""
    store = place.store.underlying_store if isinstance(place.store, PrefixStore) else place.store
    assert isinstance(store, TCPStore)
    return Launch(
        store=store,
        address=store.host,
        port=store.port,
        root=f"study/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        ranks=(place.rank,),
        first_on_host=place.rank - place.local_rank,
        num_on_host=place.local_world_size,
        supervisors=tuple(range(place.world_size)),
    )
