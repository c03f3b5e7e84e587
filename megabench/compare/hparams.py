"""Write TensorBoard's HPARAMS view of a study: the layout, settings and throughput of each trial."""

from collections.abc import Sequence
from pathlib import Path

from megabench.study.summary import Row


def write_hparams(folder: Path, rows: Sequence[Row]) -> None:
    """Add the hyperparameters of each successful trial to its TensorBoard run under `folder`."""
    # importing torch takes seconds, so it is done only at the end of a study
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    for row in rows:
        if not row.is_ok or row.tokens_per_second_per_device is None:
            continue
        settings = {
            "engine": row.engine,
            "layout": row.layout,
            "micro_batch": row.micro_batch,
            "world_size": row.world_size,
        }
        figures = {"hparams/tokens_per_second_per_device": row.tokens_per_second_per_device}
        if row.ratio is not None:
            figures[f"hparams/times_{row.reference}"] = row.ratio
        # add_hparams() would create an additional TensorBoard run for each trial
        with SummaryWriter(str(folder / row.trial)) as writer:
            for summary in hparams(settings, figures):
                writer.file_writer.add_summary(summary)
            for name, figure in figures.items():
                writer.add_scalar(name, figure)
