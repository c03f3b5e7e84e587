"""The commands on the pages of the documentation run, and those that cannot run here have flags that exist."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.command_blocks import Block, PageError, flag_errors, mark_of, read_blocks, script_of

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in (ROOT / "README.md", ROOT / "launch/README.md", *sorted(ROOT.glob("docs/*.md"))) if path.exists()
]
SECONDS = 280


@pytest.mark.e2e
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    prepare(tmp_path)
    if any(block.language == "bash" and not block.reason for block in blocks):
        status, output = run(script_of(blocks), tmp_path)
        assert status == 0, f"exit status {status}:{last_block(output, blocks)}"
    for block in blocks:  # flags may name files of the page
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    errors = [(block.line, flag_errors(block.text)) for block in blocks if block.language == "bash" and block.reason]
    assert not [(line, found) for line, found in errors if found]


def prepare(directory: Path) -> None:
    """Provide what a checkout has. Commands may write into the folders of records, so those are copies."""
    for name in ("launch", "configs", "tools"):
        if (ROOT / name).exists():
            (directory / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "benchmarks", directory / "benchmarks")


def run(script: str, directory: Path) -> tuple[int, str]:
    """Return the exit status of a bash script, and all that it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=directory,
        env=kept | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, output
    return process.returncode, output


def last_block(output: str, blocks: list[Block]) -> str:
    """Return the output of the block that ran last, from its mark on."""
    return output[max(0, *(output.rfind(mark_of(block)) for block in blocks)) :]


def fenced(text: str, info: str = "bash", above: str = "") -> str:
    return f"words\n{above}```{info}\n{text}\n```\nwords\n"


def test_blocks_are_read_with_language_title_and_reason() -> None:
    page = (
        fenced("name: a", 'yaml title="my-study.yaml"')
        + fenced("megabench plan", above="<!-- needs: GPUs -->\n")
        + "- item\n\n    ```text\n    a\n      b\n    ```\n"
        + "````text\n```\n````\n"
    )
    assert read_blocks(page) == [
        Block(2, "yaml", "name: a\n", "my-study.yaml"),
        Block(8, "bash", "megabench plan\n", reason="needs: GPUs"),
        Block(14, "text", "a\n  b\n"),
        Block(18, "text", "```\n"),
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (fenced("ls", info=""), "line 2: the block has no language"),
        (fenced("ls", above="<!-- needs: patience -->\n"), "line 2: unknown reason <!-- needs: patience -->"),
        (fenced("ls", above="<!-- runs in: the night -->\n"), "line 2: unknown reason"),
        (fenced("ls", above="<!-- needs: GPUs -->\n\n"), "line 3: .* must stand directly above"),
        (fenced("ls", "text", above="<!-- needs: GPUs -->\n"), "line 3: .* must stand directly above"),
        ("<!-- needs: GPUs -->\n", "line 1: .* must stand directly above"),
        (fenced("a", 'yaml title="configs/a.yaml"'), "line 2: .* must be a plain file name"),
        ("```bash\nls\n", "line 1: the block does not end"),
    ],
)
def test_a_page_with_a_mistake_is_refused(page: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        read_blocks(page)


def test_blocks_build_on_one_another_and_on_files(tmp_path: Path) -> None:
    page = fenced("name: a", 'yaml title="a.yaml"') + fenced("grep -c name a.yaml > count") + fenced("cat count")
    skipped = fenced("exit 3", above="<!-- needs: Slurm -->\n") + fenced("exit 3", "text")
    assert run(script_of(read_blocks(page + skipped)), tmp_path) == (
        0,
        "\n== the block at line 7\n\n== the block at line 12\n1\n",
    )


def test_a_failing_block_ends_the_script_and_shows_its_own_output(tmp_path: Path) -> None:
    blocks = read_blocks(
        fenced("echo before") + fenced("echo cause >&2\nfalse | cat\necho later") + fenced("echo after")
    )
    status, output = run(script_of(blocks), tmp_path)
    assert status == 1
    assert last_block(output, blocks) == "== the block at line 7\ncause\n"
    assert last_block("bash: no space left\n", blocks) == "bash: no space left\n"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 8 launch/pretrain.py --tp 4 --pp 2   # words",
        "torchrun --nnodes 2 \\\n    --nproc-per-node 8 -m megabench.train --tp 8 --model DIR",
        "sbatch --nodes 2 launch/slurm.sbatch launch/pretrain.py --save DIR --load DIR",
        "megabench train --nproc 4 --tp 2",
        "megabench train --nproc=4 --tp 2",
        "NCCL_DEBUG=INFO .venv/bin/megabench compare a.yaml --out DIR --resume | tee log",
        "torchrun --nproc-per-node 8 launch/compare.py a.yaml --out DIR > log 2>&1",
        "megabench --version && megabench plan --help",
        "pip install megabench --no-deps",
        "make quickstart",
    ],
)
def test_flags_that_exist_parse(command: str) -> None:
    assert flag_errors(command) == []


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("torchrun --nproc-per-node 8 launch/pretrain.py --tpp 4", "--tpp"),
        ("torchrun --nproc-per-node 8 -m megabench.train --tp 4 --nproc 8", "--nproc"),
        ("cd a && torchrun launch/pretrain.py \\\n  --zero-stag 3", "--zero-stag"),
        ("sbatch launch/slurm.sbatch launch/pretrain.py --sav DIR", "--sav"),
        ("megabench train --nproc 4 --tp two", "two"),
        ("megabench train --engine fsdp --zero-stage 3", "zero_stage"),
        ("megabench compare a.yaml --out DIR --again", "--again"),
        ("python -m megabench topo --tp", "--tp"),
        ("NAME=1 megabench reprot DIR", "reprot"),
        ("torchrun launch/compare.py a.yaml --out DIR --onyl b", "--onyl"),
        ("megabench plan 'unclosed", "No closing quotation"),
    ],
)
def test_a_wrong_flag_is_found(command: str, word: str) -> None:
    [error] = flag_errors(command)
    assert word in error
