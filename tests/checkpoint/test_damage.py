"""Only good checkpoints count: what is damaged is passed over, and said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.blocks import StateShard, blocks_of, whole
from megabench.checkpoint.directory import folder_of, prune, remove_partial, set_aside, steps_in
from megabench.checkpoint.files import write_files
from megabench.checkpoint.load import Found, find_newest_good, read_shards
from megabench.checkpoint.manifest import MANIFEST_NAME, Manifest, ModelEntry
from megabench.checkpoint.save import tensors_of
from megabench.models.catalog import get_model

CUT = whole("lm_head.weight", (8, 4))


def write(directory: Path, step: int) -> Path:
    """A checkpoint of one small tensor in two files, of which every element is `step`."""
    folder = folder_of(directory, step)
    folder.mkdir(parents=True)
    files = []
    for rank in range(2):
        blocks = blocks_of(CUT, rank * 16, rank * 16 + 16)
        files += write_files(
            folder, f"rank-{rank}", tensors_of([StateShard("weight", blocks, torch.full((16,), float(step)))])
        )
    manifest = Manifest(
        model=ModelEntry.of(get_model("llama-tiny")),
        training=None,
        num_elements={"weight": 32},
        versions={},
        files=tuple(files),
    )
    manifest.write(folder)
    return folder


def find(directory: Path) -> Found | None:
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


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "rank-1-00.safetensors has"),
    "emptied": (
        lambda folder: (folder / "rank-0-00.safetensors").write_bytes(b""),
        "rank-0-00.safetensors has 0 bytes",
    ),
    "deleted": (lambda folder: (folder / "rank-0-00.safetensors").unlink(), "rank-0-00.safetensors cannot be read"),
    "flipped": (flip("rank-1-00.safetensors"), "rank-1-00.safetensors has checksum"),
    "manifest truncated": (lambda folder: (folder / MANIFEST_NAME).write_text("{"), "manifest.json is not whole"),
    "manifest emptied": (lambda folder: (folder / MANIFEST_NAME).write_text(""), "manifest.json is not whole"),
    "manifest flipped": (flip(MANIFEST_NAME), "manifest.json"),
    "manifest deleted": (lambda folder: (folder / MANIFEST_NAME).unlink(), "manifest.json cannot be read"),
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
    assert "has no good checkpoint left" in str(error.value) and words in str(error.value)


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
        with pytest.raises(CheckpointError, match="no good checkpoint"):
            find(tmp_path)
        path.write_bytes(good)


def _loads(text: bytearray) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_nothing_there(tmp_path: Path) -> None:
    assert find(tmp_path) is None and find(tmp_path / "nowhere") is None


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    from megabench.checkpoint import manifest

    folder = write(tmp_path, 6)
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content["manifest"] |= {"schema_version": 2, "versions": {"megabench": "9.9"}}
    content["crc32"] = manifest._checksum(content["manifest"])
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"schema 2, .* reads schema 1; .*\(9\.9\)"):
        find(tmp_path)


def test_missing_elements_are_no_zeros(tmp_path: Path) -> None:
    folder = write(tmp_path, 6)
    found = find(tmp_path)
    assert found is not None
    shards = [StateShard("exp_avg", blocks_of(CUT, 0, 4), torch.zeros(4))]
    with pytest.raises(CheckpointError, match=r"0 of the 4 elements of exp_avg:lm_head.weight\[0:1,0:4\]"):
        read_shards(folder, found.manifest, shards)


def test_pruning_counts_good_ones_alone(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        write(tmp_path, step)
    truncate(folder_of(tmp_path, 12))
    prune(tmp_path, keep=2)
    assert steps_in(tmp_path) == [12, 9, 6]
    assert set_aside(folder_of(tmp_path, 12)).name == "step-00000012.damaged"
    prune(tmp_path, keep=1)
    assert steps_in(tmp_path) == [9]


def test_remains_of_a_save_are_no_checkpoint(tmp_path: Path) -> None:
    remains = tmp_path / ".step-00000006.0aff.partial"
    shutil.copytree(write(tmp_path / "other", 6), remains)
    assert find(tmp_path) is None
    remove_partial(tmp_path)
    assert not remains.exists()
