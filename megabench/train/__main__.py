"""`python -m megabench.train`: train one model under one layout on the processes of a launcher."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

from megabench.config import RunConfig
from megabench.record import Probe
from megabench.train import main as training

if TYPE_CHECKING:
    from megabench.runtime.rendezvous import Rendezvous


def find(given: RunConfig, rendezvous: "Rendezvous", device: Literal["cpu", "cuda"]) -> tuple[RunConfig, list[Probe]]:
    """Find the "auto" settings by short runs on the processes of this launch."""
    # import torch only after the flags are read, so that --help is fast
    from megabench.autotune.tune_launched import tune_launched

    return tune_launched(given, rendezvous, device)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the training that the flags in `arguments` describe, by default those of this process."""
    training.main(find, arguments)


if __name__ == "__main__":
    main()
