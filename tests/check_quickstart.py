"""Holds what `make quickstart` left to what it promises: `python tests/check_quickstart.py runs/quickstart`."""

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabench.doctor.write_findings import findings_at
from megabench.record import read_records

TRIALS = {"tp2-pp2", "tp4", "pp2-vp2-dp2", "tp2-dp2", "zero3"}


def check(folder: Path) -> None:
    """Five trials, all ok and in parity, with throughput in TensorBoard, and no finding; AssertionError otherwise."""
    records = {record.trial: record for record in read_records(folder / "results.jsonl")}
    assert records.keys() == TRIALS, records.keys() ^ TRIALS
    page = (folder / "report.html").read_text()
    assert "These timings were measured on CPUs and say nothing about GPU speed" in page
    for name, record in records.items():
        assert record.status == "ok", f"{name}: {record.error}"
        assert record.parity is not None and record.parity.verdict == "equal", f"{name}: {record.parity}"
        scalars = EventAccumulator(str(folder / "tensorboard" / name)).Reload()
        timed = scalars.Scalars("throughput/tokens_per_second")
        assert len(timed) == record.num_steps - record.warmup_steps, f"{name}: {len(timed)} steps in TensorBoard"
        assert name in page, f"{name} is not in the report"
        print(f"{name}: ok, parity {record.parity.max_relative_difference:.1e}, {len(timed)} steps in TensorBoard")
    assert findings_at(folder) == []


if __name__ == "__main__":
    check(Path(sys.argv[1]))
