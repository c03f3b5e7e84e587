"""An archive holds a study without its secrets, becomes a record, and is refused if anything in it is wrong."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from megabench import cli
from megabench.record import Environment, RunRecord, read_records, write_records
from megabench.study.archive import ArchiveError, pack, unpack
from megabench.study.results_directory import read_folder
from tests.comparison.compare_process import REPOSITORY
from tests.hardware.log_lines import job_log
from tests.study.records import make_record

STUDY = """name: crossing
question: Which layout is fastest?
base: {model: llama-tiny, device: cpu, steps: 3, warmup_steps: 1}
trials:
  - {name: zero3, engine: deepspeed, zero_stage: 3, env: {SETTING: hf_abcdefghijklmnopqrstuv, NCCL_MODE: fast}}
  - {name: tp2, tp: 2}  # with ghp_abcdefghijklmnopqrstuvwxyz0123456789
"""
FILES = ["study.yaml", "results.jsonl", "environment.json", "transport.json"]
SECRET = "open sesame"
TOKENS = ("hf_abcdefghijklmnopqrstuv", "AKIAABCDEFGHIJKLMNOP", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results of a study, with secrets, logs and sketches."""
    monkeypatch.setenv("STORE_PASSWORD", SECRET)
    out = tmp_path / "results"
    out.mkdir()
    (out / "study.yaml").write_text(STUDY)
    variables = {"NCCL_NET": "OFI", "TORCH_API_KEY": "1234", "NCCL_NAME": TOKENS[1]}
    environment = Environment(versions={"torch": "2.11.0"}, variables=variables, host="node-0")
    (out / "environment.json").write_text(environment.model_dump_json())
    failed = make_record([], trial="tp2", status="failed", error=f"no access with {SECRET} and {TOKENS[2]}")
    good = make_record([2.0, 1.5], trial="zero3", engine="deepspeed", environment=environment, num_hosts=2)
    write_records(out / "results.jsonl", [good, failed])
    logs = out / "logs" / "zero3"
    logs.mkdir(parents=True)
    for host in (0, 1):
        (logs / f"nccl-rank-{host}.log").write_text(job_log(host))
    (logs / "sketches.safetensors").write_bytes(b"tensors")
    (logs / "rank-0.log").write_text(SECRET)
    return out


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "results.tar.gz"
    pack(folder, path)
    return path


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def write(path: Path, files: Mapping[str, bytes]) -> None:
    """Write an archive with these members."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_an_archive_has_the_evidence_and_no_logs_and_tensors(archive: Path, folder: Path, tmp_path: Path) -> None:
    files = content(archive)
    assert list(files) == [f"crossing/{name}" for name in FILES]
    transport = json.loads(files["crossing/transport.json"])
    assert list(transport) == ["zero3"] and transport["zero3"]["provider"] == "efa"
    assert transport["zero3"]["summary"][0].startswith("Between hosts: EFA with GPUDirect RDMA")
    assert transport["zero3"]["between_hosts"] == ["NET/Libfabric/GDRDMA"]
    pack(folder, tmp_path / "again.tar.gz")
    assert (tmp_path / "again.tar.gz").read_bytes() == archive.read_bytes()


def test_an_archive_has_no_secrets(archive: Path) -> None:
    text = b"".join(content(archive).values()).decode()
    assert not [secret for secret in (SECRET, *TOKENS, "TORCH_API_KEY", "ghp_") if secret in text]
    assert "no access with *** and ***" in text and '"NCCL_NET"' in text and "NCCL_MODE: fast" in text


def test_records_without_secrets_are_packed_unchanged(tmp_path: Path) -> None:
    source = REPOSITORY / "benchmarks/confirmed-two-h200"
    pack(source, tmp_path / "study.tar.gz")
    out = unpack(tmp_path / "study.tar.gz", tmp_path / "record")
    assert read_records(out / "results.jsonl") == read_records(source / "results.jsonl")
    for name in ("study.yaml", "environment.json"):
        assert (out / name).read_text() == (source / name).read_text()


def test_an_archive_becomes_a_record(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = unpack(archive, tmp_path / "benchmarks/crossing")
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "README.md"])
    assert [path.name for path in out.parent.iterdir()] == ["crossing"]
    page = (out / "README.md").read_text()
    assert page.startswith("# crossing\n\nWhich layout is fastest?\n") and "| zero3" in page
    assert "- Between hosts: EFA with GPUDirect RDMA (NET/Libfabric/GDRDMA). (zero3)" in page and "torch 2.11.0" in page
    study = read_folder(out)
    assert (study.name, [record.trial for record in study.records]) == ("crossing", ["zero3", "tp2"])
    monkeypatch.chdir(tmp_path)
    assert unpack(archive) == Path("runs/crossing") and Path("runs/crossing/README.md").is_file()


def test_an_archive_of_an_unpacked_archive_is_equal(archive: Path, tmp_path: Path) -> None:
    """Without logs, only the transports are lost."""
    pack(unpack(archive, tmp_path / "record"), tmp_path / "second.tar.gz")
    first, second = content(archive), content(tmp_path / "second.tar.gz")
    assert first | {"crossing/transport.json": b"{}\n"} == second


def test_a_record_that_exists_is_kept(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "record"
    out.mkdir()
    (out / "README.md").write_text("figures")
    with pytest.raises(ArchiveError, match="record already exists; use another --out"):
        unpack(archive, out)
    assert [path.name for path in out.iterdir()] == ["README.md"] and (out / "README.md").read_text() == "figures"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArchiveError, match="already exists"):
        unpack(archive, tmp_path / "link")


BAD: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "parent": (lambda files: files | {"../results.jsonl": b""}, "contains '../results.jsonl', which is no file of a"),
    "absolute": (lambda files: files | {"/etc/results.jsonl": b""}, "which is no file of a study"),
    "deep": (lambda files: files | {"crossing/a/../../results.jsonl": b""}, "which is no file of a study"),
    "tensors": (lambda files: files | {"crossing/model.safetensors": b""}, "which is no file of a study"),
    "two": (lambda files: {("a" if "y" in name[9:] else "b") + name[8:]: files[name] for name in files}, "a and b"),
    "missing": (lambda files: {name: files[name] for name in files if "results" not in name}, "no results.jsonl"),
    "empty": (lambda files: {}, "contains no study.yaml"),
    "no-record": (lambda files: files | {"crossing/results.jsonl": b"{}\n"}, "line 1 is not a record of a trial"),
    "no-records": (lambda files: files | {"crossing/results.jsonl": b"\n"}, "no record of a trial; use a file"),
    "cut": (lambda files: files | {"crossing/results.jsonl": files["crossing/results.jsonl"][:-40]}, "is not JSON"),
    "bytes": (lambda files: files | {"crossing/environment.json": b"\xff"}, "environment.json is not JSON"),
    "list": (lambda files: files | {"crossing/transport.json": b"[]"}, "transport.json contains no JSON object"),
    "study": (lambda files: files | {"crossing/study.yaml": b"trials: {"}, "study.yaml"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_archives_are_refused_and_leave_nothing(name: str, archive: Path, tmp_path: Path) -> None:
    change, message = BAD[name]
    bad = tmp_path / "bad.tar.gz"
    write(bad, change(content(archive)))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArchiveError) as raised:
        unpack(bad, tmp_path / "record")
    assert str(raised.value).startswith(str(bad)) and message in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_and_repeated_files_are_refused(archive: Path, tmp_path: Path) -> None:
    for name, kind in (("results.jsonl", tarfile.SYMTYPE), ("results.jsonl", tarfile.LNKTYPE), ("", tarfile.DIRTYPE)):
        link = tarfile.TarInfo(f"crossing/{name}")
        link.type, link.linkname = kind, "/etc/passwd"
        with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
            tar.addfile(link)
        with pytest.raises(ArchiveError, match="which is no file of a study"):
            unpack(tmp_path / "bad.tar.gz", tmp_path / "record")
    twice = tarfile.TarInfo("crossing/study.yaml")
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as tar:
        tar.addfile(twice)
        tar.addfile(twice)
    with pytest.raises(ArchiveError, match=r"'crossing/study\.yaml', which is no file of a study"):
        unpack(tmp_path / "bad.tar.gz", tmp_path / "record")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, "which is no file of a study"),
        ({"GNU.sparse.map": f"0,1,{6 << 30},0", "GNU.sparse.size": str(6 << 30)}, "which is no file of a study"),
        ({"GNU.sparse.map": "x,y"}, "is not an intact tar.gz file"),
        ({"size": str(6 << 30)}, "which is no file of a study"),
    ],
)
def test_files_larger_than_the_archive_are_refused(headers: dict[str, str], message: str, tmp_path: Path) -> None:
    member = tarfile.TarInfo("crossing/study.yaml")
    member.pax_headers, data = headers, f"1\n{6 << 30}\n0\n".encode().ljust(512, b"\0")
    member.size = len(data)
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(data))
    with pytest.raises(ArchiveError) as raised:
        unpack(tmp_path / "bad.tar.gz", tmp_path / "record")
    assert message in str(raised.value) and str(raised.value).count("use a file") == 1


def test_an_old_sparse_file_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("crossing/study.yaml")
    member.type = tarfile.GNUTYPE_SPARSE
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(ArchiveError, match="which is no file of a study"):
        unpack(tmp_path / "bad.tar.gz", tmp_path / "record")


def test_every_truncated_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    whole, cut = archive.read_bytes(), tmp_path / "cut.tar.gz"
    for size in [*range(0, len(whole), 97), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ArchiveError):
            unpack(cut, tmp_path / "record")
    tar = gzip.decompress(whole)
    cut.write_bytes(gzip.compress(tar[: tar.index(b'"losses"')]))
    with pytest.raises(ArchiveError, match=r"is not an intact tar\.gz file"):
        unpack(cut, tmp_path / "record")
    assert not (tmp_path / "record").exists()


def test_a_damaged_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    """The check sum of gzip finds any changed byte of the compressed data."""
    whole, bad = archive.read_bytes(), tmp_path / "bad.tar.gz"
    for place in range(10, len(whole), 211):
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ArchiveError):
            unpack(bad, tmp_path / "record")
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize("name", ["study.yaml", "results.jsonl", "environment.json"])
def test_only_the_results_of_a_study_are_packed(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ArchiveError, match=f"results contains no {name}; use the --out directory"):
        pack(folder, tmp_path / "new.tar.gz")
    assert not (tmp_path / "new.tar.gz").exists()


def test_only_an_archive_is_replaced(archive: Path, folder: Path) -> None:
    records = read_records(folder / "results.jsonl")
    write_records(folder / "results.jsonl", records[:1])
    pack(folder, archive)
    assert content(archive)["crossing/results.jsonl"].count(b"\n") == 1
    archive.write_text("thesis")
    with pytest.raises(ArchiveError, match="exists and is no archive of megabench pack; use another --out"):
        pack(folder, archive)
    assert archive.read_text() == "thesis"


def test_logs_that_cannot_be_read_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "logs" / "zero3" / "nccl-rank-0.log").write_text("nothing")
    pack(folder, tmp_path / "new.tar.gz")
    found = json.loads(content(tmp_path / "new.tar.gz")["crossing/transport.json"])["zero3"]
    assert found["summary"] == [] and "nccl-rank-0.log: unknown content" in found["warnings"][0]


def test_the_commands(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def megabench(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["megabench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    monkeypatch.delenv("RANK", raising=False)
    archive = folder.with_name("results.tar.gz")
    assert megabench("pack", folder) == (0, f"{archive}\n", "")
    assert megabench("unpack", archive, "--out", tmp_path / "record") == (0, f"{tmp_path / 'record'}\n", "")
    status, _, error = megabench("unpack", archive, "--out", tmp_path / "record")
    assert (status, error) == (2, f"Error: {tmp_path / 'record'} already exists; use another --out\n")
    status, _, error = megabench("unpack", tmp_path / "none.tar.gz")
    assert (
        status == 2
        and error == f"Error: cannot access {tmp_path / 'none.tar.gz'}: No such file or directory; use another path\n"
    )
    assert RunRecord.model_validate_json((tmp_path / "record/results.jsonl").read_text().splitlines()[0])
