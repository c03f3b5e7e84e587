"""The archive of a study: study file, records and evidence in one tar.gz file without secrets. Loads no torch."""

import gzip
import io
import json
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megabench.atomic_write import write_atomically
from megabench.errors import UserError
from megabench.inputs import LARGE, parse_json, read_bytes, read_json, read_text
from megabench.record import RunRecord, read_records
from megabench.study.expand import SAFE_NAME
from megabench.study.masking import without_secrets, without_secrets_in
from megabench.study.results_directory import StudyRecords, read_folder
from megabench.study.study import run_folder
from megabench.study.table import markdown
from megabench.transport_summary import summarize

_NEEDED = ("study.yaml", "results.jsonl", "environment.json")
_TRANSPORTS = "transport.json"
_PAGE = "README.md"  # written by `unpack`
_REMEDY = "use a file that megabench pack has written"


class ArchiveError(UserError):
    """Raised if a directory cannot be packed or an archive cannot be unpacked."""


def pack(folder: Path, archive: Path) -> None:
    """Write the study whose results are in `folder` to `archive`, and replace an older archive.

    The archive contains the study file, the records, the environment, and a summary of NCCL's transports in each run,
    but no logs and no tensors. Secrets are removed.

    Raises UserError if `folder` is not the output directory of a study.
    """
    if missing := [name for name in _NEEDED if not (folder / name).is_file()]:
        raise ArchiveError(f"{folder} contains no {missing[0]}; use the --out directory of megabench compare")
    study = read_folder(folder)
    if archive.exists():
        try:
            _read(archive)
        except ArchiveError:
            raise ArchiveError(f"{archive} exists and is no archive of megabench pack; use another --out") from None
    records = read_records(folder / "results.jsonl")
    texts = {
        "study.yaml": without_secrets(read_text(folder / "study.yaml")),
        "results.jsonl": "".join(f"{_without_secrets(record).model_dump_json()}\n" for record in records),
        "environment.json": _json(read_json(folder / "environment.json")),
        _TRANSPORTS: _json(_transports(folder, records)),
    }
    name = study.name if SAFE_NAME.fullmatch(study.name) else "study"
    write_atomically(archive, _compressed(name, {file: text.encode() for file, text in texts.items()}))


def unpack(archive: Path, out: Path | None = None) -> Path:
    """Write the files of `archive` to the new directory `out` [default: runs/STUDY], and return the directory.

    README.md in the directory shows the answer, the table, the hosts and the transports.

    Raises UserError if the file is not a complete archive of a study, or if the directory exists. Nothing is written
    then.
    """
    name, files = _read(archive)
    out = out or Path("runs", name)
    if out.exists() or out.is_symlink():
        raise ArchiveError(f"{out} already exists; use another --out")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as beside:
        partial = Path(beside, name)
        partial.mkdir()
        for file, content in files.items():
            (partial / file).write_bytes(content)
        (partial / _PAGE).write_text(_checked_page(partial, archive), encoding="utf-8")
        partial.rename(out)
    return out


def _without_secrets(record: RunRecord) -> RunRecord:
    return RunRecord.model_validate(without_secrets_in(record.model_dump(mode="json")))


def _json(value: Any) -> str:
    return json.dumps(without_secrets_in(value), indent=2) + "\n"


def _transports(folder: Path, records: list[RunRecord]) -> dict[str, Any]:
    """Return the summary of NCCL's transports, or the reason why there is none, for each run with NCCL logs."""
    found: dict[str, Any] = {}
    for record in records:
        run = run_folder(record.trial, record.repeat)
        if logs := sorted((folder / "logs" / run).glob("nccl-rank-*.log")):
            try:
                found[run.as_posix()] = summarize(logs)
            except UserError as error:
                found[run.as_posix()] = {"summary": [], "warnings": [str(error)]}
    return found


def _compressed(name: str, files: Mapping[str, bytes]) -> bytes:
    """Return a tar.gz file with `files` in the directory `name`. Equal files give equal bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file, data in files.items():
            member = tarfile.TarInfo(f"{name}/{file}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(content.getvalue(), mtime=0)


def _read(archive: Path) -> tuple[str, dict[str, bytes]]:
    """Return the name of the study and the files of an archive. Raises ArchiveError unless it is complete.

    Only plain files of known names in one directory are accepted, so no path leads out of the directory. Sparse files
    are refused, because they are larger than the archive.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(read_bytes(archive, LARGE))) as stream:
            content = stream.read(LARGE + 1)
    except EOFError:
        raise ArchiveError(f"{archive} is incomplete; copy the archive again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ArchiveError(f"{archive} is not an intact tar.gz file ({error}); {_REMEDY}") from None
    if len(content) > LARGE:
        raise ArchiveError(f"{archive} contains more than {LARGE >> 20} MiB; {_REMEDY}")
    files: dict[str, bytes] = {}
    folders: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                folder, _, file = member.name.partition("/")
                known = file in (*_NEEDED, _TRANSPORTS) and file not in files
                is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
                if not (is_plain and member.size <= LARGE and known and SAFE_NAME.fullmatch(folder)):
                    raise ArchiveError(f"{archive} contains {member.name!r}, which is no file of a study; {_REMEDY}")
                data = tar.extractfile(member)
                assert data
                files[file] = data.read()
                folders.add(folder)
    except ArchiveError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise ArchiveError(f"{archive} is not an intact tar.gz file ({error}); {_REMEDY}") from None
    if missing := [name for name in _NEEDED if name not in files]:
        raise ArchiveError(f"{archive} contains no {missing[0]}; {_REMEDY}")
    if not files["results.jsonl"].strip():
        raise ArchiveError(f"{archive} contains no record of a trial; {_REMEDY}")
    if len(folders) > 1:
        raise ArchiveError(f"{archive} contains the directories {' and '.join(sorted(folders))}; {_REMEDY}")
    return folders.pop(), files


def _checked_page(folder: Path, archive: Path) -> str:
    """Return the page of the unpacked study in `folder`. Raises ArchiveError if a file in it is invalid."""
    try:
        return _page(read_folder(folder), *(_object(folder / name) for name in ("environment.json", _TRANSPORTS)))
    except (UserError, ValueError) as error:
        raise ArchiveError(f"{archive}: {str(error).replace(f'{folder}/', '')}") from None


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if the file does not exist."""
    try:
        content = parse_json(read_text(path, LARGE)) if path.exists() else {}
    except ValueError as error:
        raise ArchiveError(f"{path} is not JSON ({error}); {_REMEDY}") from None
    if not isinstance(content, dict):
        raise ArchiveError(f"{path} contains no JSON object; {_REMEDY}")
    return content


def _page(study: StudyRecords, environment: dict[str, Any], transports: dict[str, Any]) -> str:
    """Return the Markdown page of a study: question, hosts, answer, table and transports."""
    table = markdown(study.records, study.reference, study.answers)
    parts = [f"# {study.name}", study.question, "\n".join(_hosts(study, environment)), table]
    by_summary: dict[str, list[str]] = {}
    for run, found in transports.items():
        summary = found.get("summary") if isinstance(found, dict) else None
        for line in summary[:2] if isinstance(summary, list) else ():  # between hosts, and inside them
            by_summary.setdefault(str(line), []).append(run)
    parts.append("\n".join(f"- {line} ({_some(runs)})" for line, runs in by_summary.items()))
    return "\n\n".join(filter(None, parts)) + "\n"


def _hosts(study: StudyRecords, environment: dict[str, Any]) -> Iterator[str]:
    """Yield lines about the hosts and the versions of the runs."""
    for hosts in dict.fromkeys(_hosts_of(record) for record in study.records):
        yield f"- {hosts}"
    versions = environment.get("versions")
    if isinstance(versions, dict):
        chosen = [f"{name} {versions[name]}" for name in versions if re.match(r"megabench|torch$|nvidia-nccl", name)]
        yield f"- {', '.join(chosen)}"


def _hosts_of(record: RunRecord) -> str:
    kinds = sorted({machine.instance_type for machine in record.machines if machine.instance_type})
    of = f" ({', '.join(kinds)})" if kinds else ""
    number, emulated = record.num_hosts or 1, "emulated " if record.emulated_hosts else ""
    return f"{record.world_size} × {record.device} on {number} {emulated}host{'s' * (number > 1)}{of}"


def _some(runs: list[str]) -> str:
    return ", ".join(runs[:3]) + f" and {len(runs) - 3} more runs" * (len(runs) > 3)
