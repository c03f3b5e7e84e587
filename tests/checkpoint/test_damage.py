"""Only good checkpoints count: what is damaged is passed over, and said."""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import (
    RUN_ID_NAME,
    claim_run_id,
    commit,
    discard,
    folder_of,
    is_launched_by,
    looks_good,
    partial_folder,
    prune,
    remove_partial,
    set_aside,
    steps_in,
)
from megabench.checkpoint.files import write_files
from megabench.checkpoint.loading import FoundCheckpoint, find_newest_good, read_shards
from megabench.checkpoint.manifest import (
    MANIFEST_NAME,
    DataEntry,
    FileEntry,
    Manifest,
    ModelEntry,
    OptimizerEntry,
    TrainingEntry,
)
from megabench.checkpoint.save import tensors_of
from megabench.checkpoint.shards import StateShard, blocks_of, whole
from megabench.checkpoint.weights_only import open_weights
from megabench.models.catalog import get_model
from megabench.optim.optimizers import StateKind

CUT = whole("lm_head.weight", (8, 4))
RUN_ID = "0123456789ab"
TOKEN = f"{RUN_ID}-77"


def write(directory: Path, step: int, value: float | None = None, run_id: str = RUN_ID) -> Path:
    """A checkpoint of one small tensor in two files, of which every element is `value`, by default `step`."""
    value = float(step) if value is None else value
    folder = folder_of(directory, step)
    folder.mkdir(parents=True)
    files = []
    for rank in range(2):
        blocks = blocks_of(CUT, rank * 16, rank * 16 + 16)
        files += write_files(
            folder, f"rank-{rank}", tensors_of([StateShard("weight", blocks, torch.full((16,), value))])
        )
    manifest_of(step, files, run_id).write(folder)
    return folder


def manifest_of(step: int, files: Sequence[FileEntry], run_id: str = RUN_ID) -> Manifest:
    return Manifest(
        model=ModelEntry.of(get_model("llama-tiny")),
        training=TrainingEntry(
            run_id=run_id,
            step=step,
            engine="megatron",
            layout={},
            world_size=2,
            optimizer=OptimizerEntry(name="sgd", step=step),
            data=DataEntry(name="synthetic", sha256="", next_sequence=0),
            config={},
        ),
        num_elements={"weight": 32},
        versions={},
        files=tuple(files),
    )


def find(directory: Path) -> FoundCheckpoint | None:
    return find_newest_good(directory, HashStore(), rank=0, world_size=1, topic="test")


def truncate(folder: Path) -> None:
    path = folder / "rank-1-00.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def flip(name: str) -> Callable[[Path], None]:
    def flip_one_bit(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) * 3 // 4] ^= 4
        (folder / name).write_bytes(content)

    return flip_one_bit


def forge(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of the manifest under a checksum that is right."""

    def forge_manifest(folder: Path) -> None:
        body = json.loads((folder / MANIFEST_NAME).read_text())["manifest"]
        change(body)
        content = {"crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode()), "manifest": body}
        (folder / MANIFEST_NAME).write_text(json.dumps(content))

    return forge_manifest


def replace_by(make: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def store_as(
    dtype: torch.dtype, kind: StateKind = "weight", value: float = 1.0, start: int = 0
) -> Callable[[Path], None]:
    """Other tensors in the first file, with sizes and checksums that are right."""

    def convert(folder: Path) -> None:
        shard = StateShard(kind, blocks_of(CUT, start, start + 16), torch.full((16,), value, dtype=dtype))
        (entry,) = write_files(folder, "rank-0", tensors_of([shard]))
        forge(lambda body: body["files"].__setitem__(0, entry.model_dump()))(folder)

    return convert


def rollback_to(restored_step: int) -> dict[str, Any]:
    return {"step": 5, "restored_step": restored_step, "next_batch": 9, "problem": "a test"}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "rank-1-00.safetensors has"),
    "emptied": (
        lambda folder: (folder / "rank-0-00.safetensors").write_bytes(b""),
        "rank-0-00.safetensors has 0 bytes",
    ),
    "deleted": (lambda folder: (folder / "rank-0-00.safetensors").unlink(), "rank-0-00.safetensors cannot be read"),
    "flipped": (flip("rank-1-00.safetensors"), "rank-1-00.safetensors has checksum"),
    "manifest truncated": (lambda folder: (folder / MANIFEST_NAME).write_text("{"), "is not a complete JSON manifest"),
    "manifest emptied": (lambda folder: (folder / MANIFEST_NAME).write_text(""), "is not a complete JSON manifest"),
    "manifest flipped": (flip(MANIFEST_NAME), "manifest.json"),
    "manifest deleted": (lambda folder: (folder / MANIFEST_NAME).unlink(), "manifest.json cannot be read"),
    "manifest is a list": (
        lambda folder: (folder / MANIFEST_NAME).write_text("[1, 2]"),
        "manifest.json is not a complete JSON manifest",
    ),
    "manifest holds a list": (
        lambda folder: (folder / MANIFEST_NAME).write_text(json.dumps({"crc32": zlib.crc32(b"[]"), "manifest": []})),
        "manifest.json is not a complete JSON manifest",
    ),
    "manifest is nested deeply": (
        lambda folder: (folder / MANIFEST_NAME).write_text("[" * 100_000),
        "manifest.json is not a complete JSON manifest",
    ),
    "manifest is a pipe": (replace_by(os.mkfifo, MANIFEST_NAME), "manifest.json cannot be read"),
    "manifest is endless": (
        replace_by(lambda path: path.symlink_to("/dev/zero"), MANIFEST_NAME),
        "manifest.json cannot be read",
    ),
    "a file is a pipe": (replace_by(os.mkfifo, "rank-0-00.safetensors"), "rank-0-00.safetensors is not a regular file"),
    "a file is elsewhere": (
        forge(lambda body: body["files"][0].update(name="../../secret")),
        "manifest.json has a missing or invalid field: ('files', 0, 'name')",
    ),
    "the step is another": (
        forge(lambda body: body["training"].update(step=3)),
        "manifest.json has step 3, unlike the directory's name",
    ),
    "the step is absurd": (
        forge(lambda body: body["training"].update(step=10**12)),
        "manifest.json has a missing or invalid field",
    ),
    "the optimizer has made a negative number of steps": (
        forge(lambda body: body["training"]["optimizer"].update(step=-1)),
        "manifest.json has a missing or invalid field: ('training', 'optimizer', 'step')",
    ),
    "the next sequence is absurd": (
        forge(lambda body: body["training"]["data"].update(next_sequence=2**63)),
        "manifest.json has a missing or invalid field",
    ),
    "a rollback goes forward": (
        forge(lambda body: body["training"].update(rollbacks=[rollback_to(7)])),
        "manifest.json has a missing or invalid field: ('training', 'rollbacks', 0)",
    ),
    "a rollback returns to before the first step": (
        forge(lambda body: body["training"].update(rollbacks=[rollback_to(-1)])),
        "manifest.json has a missing or invalid field",
    ),
    "a second moment is negative": (
        store_as(torch.float32, "exp_avg_sq", -1e-9),
        "exp_avg_sq:lm_head.weight[0:4,0:4] has negative values, but exp_avg_sq is a mean of squares",
    ),
    "the dtype is another": (store_as(torch.bfloat16), "has dtype BF16; expected F32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    harm, words = DAMAGES[damage]
    older, newest = write(tmp_path, 6), write(tmp_path, 12)
    found = find(tmp_path)
    assert found is not None and found.folder == newest and not found.passed_over
    harm(newest)
    found = find(tmp_path)
    assert found is not None and found.folder == older
    assert list(found.passed_over) == [newest] and words in found.passed_over[newest]
    values = torch.zeros(10)
    read_shards(found.folder, found.manifest, [StateShard("weight", blocks_of(CUT, 11, 21), values)])
    assert (values == 6).all()
    harm(older)
    with pytest.raises(CheckpointError) as error:
        find(tmp_path)
    assert "contains no valid checkpoint" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("place", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.999])
def test_any_flipped_bit_is_found(tmp_path: Path, place: float) -> None:
    folder = write(tmp_path, 6)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[int(place * len(bad))] ^= 1
        path.write_bytes(bad)
        if path.suffix == ".json" and json.loads(good) == _loads(bad):
            continue  # white space
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            find(tmp_path)
        path.write_bytes(good)


def _loads(text: bytearray) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_nothing_there(tmp_path: Path) -> None:
    assert find(tmp_path) is None and find(tmp_path / "nowhere") is None


@pytest.mark.parametrize("schema", [1, 3])
def test_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    from megabench.checkpoint import manifest

    folder = write(tmp_path, 6)
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content["manifest"] |= {"schema_version": schema, "versions": {"megabench": "9.9"}}
    content["crc32"] = manifest._checksum(content["manifest"])
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"schema {schema}, .* reads schema 2\. .*\(9\.9\)"):
        find(tmp_path)


def test_missing_elements_are_no_zeros(tmp_path: Path) -> None:
    folder = write(tmp_path, 6)
    found = find(tmp_path)
    assert found is not None
    shards = [StateShard("exp_avg", blocks_of(CUT, 0, 4), torch.zeros(4))]
    with pytest.raises(CheckpointError, match=r"0 of the 4 elements of exp_avg:lm_head.weight\[0:1,0:4\]"):
        read_shards(folder, found.manifest, shards)


def test_overlapping_blocks_do_not_hide_missing_ones(tmp_path: Path) -> None:
    """Rows 2 to 6 and 4 to 8: as many elements as the tensor has rows 2 to 8 and two that nobody wrote."""
    folder = write(tmp_path, 6)
    store_as(torch.float32, start=8)(folder)
    found = find(tmp_path)
    assert found is not None
    shards = [StateShard("weight", blocks_of(CUT, 0, 32), torch.zeros(32))]
    with pytest.raises(CheckpointError, match=r"the files contain weight:lm_head.weight\[4:6,0:4\] twice"):
        read_shards(folder, found.manifest, shards)
    with pytest.raises(CheckpointError, match="twice"):
        open_weights(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_passed_over(tmp_path: Path, value: float) -> None:
    """Sizes and checksums are right: a version that did not check wrote it, or somebody made it."""
    older, newest = write(tmp_path, 6), write(tmp_path, 12, value)
    found = find(tmp_path)
    assert found is not None and found.folder == older
    problem = "16 values of the training state are NaN or infinite: weight lm_head.weight (16)"
    assert found.passed_over == {newest: f"rank-0-00.safetensors: {problem}"}
    with pytest.raises(CheckpointError, match=r"is damaged: in step-00000012, rank-0-00.safetensors: 16 values"):
        find(newest)


STEPS = (3, 6, 9, 12)


def test_pruning_counts_good_ones_alone(tmp_path: Path) -> None:
    for step in STEPS:
        write(tmp_path, step)
    truncate(folder_of(tmp_path, 12))
    prune(tmp_path, 2, TOKEN, healthy_before=12, verified=STEPS)
    assert steps_in(tmp_path) == [12, 9, 6]
    assert set_aside(folder_of(tmp_path, 12), "damaged").name == "step-00000012.damaged"
    prune(tmp_path, 1, TOKEN, healthy_before=12, verified=STEPS)
    assert steps_in(tmp_path) == [9]


@pytest.mark.parametrize(
    ("verified", "left"),
    [((), [12, 9, 6, 3]), ((12,), [12, 9, 6, 3]), ((9,), [12, 9]), ((12, 9), [12, 9]), ((12, 6), [12, 6])],
)
def test_pruning_counts_only_checkpoints_that_were_read_back(
    tmp_path: Path, verified: tuple[int, ...], left: list[int]
) -> None:
    """All sizes are right. A checkpoint that nobody has read back replaces no other one."""
    for step in STEPS:
        write(tmp_path, step)
    prune(tmp_path, 1, TOKEN, healthy_before=12, verified=verified)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(
    ("healthy_before", "left"),
    [(0, [12, 9, 6, 3]), (3, [12, 9, 6, 3]), (4, [12, 3]), (10, [12, 9]), (12, [12, 9]), (13, [12])],
)
def test_the_newest_healthy_one_stays(tmp_path: Path, healthy_before: int, left: list[int]) -> None:
    """Step 12 is new; steps up to `healthy_before` had finite losses, so that what they began with was healthy."""
    for step in STEPS:
        write(tmp_path, step)
    prune(tmp_path, 1, TOKEN, healthy_before, STEPS)
    assert steps_in(tmp_path) == left


def test_pruning_leaves_alone_what_the_run_did_not_create(tmp_path: Path) -> None:
    """Another run's checkpoints, and the run's own behind a symbolic link."""
    elsewhere = write(tmp_path / "elsewhere", 1)
    directory = tmp_path / "run"
    for step, run_id in ((2, "ffffffffffff"), (3, "eeeeeeeeeeee"), (4, RUN_ID), (5, RUN_ID)):
        write(directory, step, run_id=run_id)
    folder_of(directory, 1).symlink_to(elsewhere, target_is_directory=True)
    prune(directory, 1, TOKEN, healthy_before=6, verified=(1, 2, 3, 4, 5))
    assert steps_in(directory) == [5, 3, 2, 1]
    assert looks_good(elsewhere) and folder_of(directory, 1).is_symlink()


def test_no_save_replaces_a_checkpoint(tmp_path: Path) -> None:
    own, other = write(tmp_path, 4), write(tmp_path, 5, run_id="ffffffffffff")
    link, partial = folder_of(tmp_path, 6), partial_folder(tmp_path, 4, TOKEN)
    link.symlink_to(tmp_path / "nowhere", target_is_directory=True)
    shutil.copytree(own, partial)
    for folder in (own, other, link):
        with pytest.raises(CheckpointError, match=r"already exists\. Move it away\."):
            commit(partial, folder)
    assert looks_good(own) and looks_good(other) and looks_good(partial) and link.is_symlink()


def test_remains_of_a_save_are_no_checkpoint(tmp_path: Path) -> None:
    remains = partial_folder(tmp_path, 6, f"{RUN_ID}-0aff")
    shutil.copytree(write(tmp_path / "other", 6), remains)
    assert find(tmp_path) is None
    assert remove_partial(tmp_path, RUN_ID) == []
    assert not remains.exists()


def test_a_deletion_that_was_cut_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies right after the renaming: the rest is no checkpoint, and the next start deletes it."""
    folder = write(tmp_path, 6)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        discard(folder, TOKEN)
    assert steps_in(tmp_path) == [] and len(list(tmp_path.iterdir())) == 1
    assert remove_partial(tmp_path, RUN_ID) == [] and not list(tmp_path.iterdir())


def test_remains_of_other_runs_stay(tmp_path: Path) -> None:
    other = partial_folder(tmp_path, 6, "ffffffffffff-0aff")
    shutil.copytree(write(tmp_path / "elsewhere", 6), other)
    old = tmp_path / ".step-00000003.1f0c.partial"  # not of this run either
    old.mkdir()
    link = partial_folder(tmp_path, 9, f"{RUN_ID}-0aff")
    link.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert remove_partial(tmp_path, RUN_ID) == sorted([old, other, link])
    assert (other / MANIFEST_NAME).exists() and steps_in(tmp_path / "elsewhere") == [6]


def test_a_run_that_continues_keeps_its_identity(tmp_path: Path) -> None:
    first = claim_run_id(tmp_path, "job 1", continues=False)
    assert is_launched_by(tmp_path, "job 1") and not is_launched_by(tmp_path, "job 2")
    assert claim_run_id(tmp_path, "job 2", continues=True) == first and is_launched_by(tmp_path, "job 2")
    other = claim_run_id(tmp_path, "job 2", continues=False)
    assert other != first and claim_run_id(tmp_path, "job 2", continues=True) == other
    (tmp_path / RUN_ID_NAME).write_text("nonsense")
    assert not is_launched_by(tmp_path, "nonsense")
    assert claim_run_id(tmp_path, "job 2", continues=True) not in (first, other)
