"""Run the steps of the Dockerfile's stage `plain` in a chroot, without Docker, and then train in it.

    python -m tests.launch.dockerfile_in_chroot [--keep]

Needs root, and debootstrap from apt. debootstrap makes a Debian root in place of the stage's base image, so the chroot
has Debian's Python instead of the image's. pip inside the chroot has the configuration and the local wheels of this
machine, which replace the CUDA build of torch where they hold another one.
"""

import argparse
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BASE_PACKAGES = "ca-certificates,python3,python3-dev,python3-pip,python-is-python3"
TRAINING = (
    "torchrun --nproc-per-node 2 -m megabench.train --model llama-tiny --num-layers 2 --seq-length 64 --steps 3 "
    "--device cpu --tp 2"
)


def instructions(stage: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a stage of the Dockerfile, with continuation lines joined."""
    text = "\n".join(
        line for line in (REPOSITORY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    )
    is_inside = False
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            is_inside = rest.endswith(f" AS {stage}")
        elif name and is_inside:
            yield name, rest.strip()


def ignored(path: Path) -> bool:
    """Return whether .dockerignore excludes a path, which is relative to the repository."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    prefixes = [Path(*path.parts[: end + 1]) for end in range(len(path.parts))]
    return any(
        fnmatch.fnmatchcase(prefix.name if pattern.startswith("**/") else str(prefix), pattern.removeprefix("**/"))
        for prefix in prefixes
        for pattern in patterns
    )


def copy_context(target: Path) -> None:
    for folder, names, files in os.walk(REPOSITORY):
        here = Path(folder).relative_to(REPOSITORY)
        names[:] = [name for name in names if not ignored(here / name)]
        (target / here).mkdir(parents=True, exist_ok=True)
        for file in files:
            if not ignored(here / file):
                shutil.copy2(Path(folder) / file, target / here / file)


def make_root(root: Path, suite: str) -> None:
    """Make a Debian root with Python and with what pip needs on this machine."""
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", suite, root], check=True)
    for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(path).exists():
            shutil.copyfile(path, root / path[1:])
    for path in ("/etc/apt/apt.conf.d", "/opt"):  # the apt proxy; the local wheels
        if Path(path).exists():
            shutil.copytree(path, root / path[1:], dirs_exist_ok=True, symlinks=True)


class Chroot:
    """Runs commands inside the root as `docker build` does: each in a shell, in the stage's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = "/"
        kept = {name: os.environ[name] for name in os.environ if name.startswith("PIP_") or name.endswith("_proxy")}
        # Debian's pip refuses to install into Debian's Python; the pip of the base image does not
        more = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore", "DEBIAN_FRONTEND": "noninteractive"}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.environment = kept | more | {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

    def run(self, command: str) -> None:
        inner = f"cd {shlex.quote(self.directory)} && {command}"
        # a mount namespace of its own: the mounts end with the command
        outer = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" /bin/sh -c "$1"'
        subprocess.run(["unshare", "--mount", "sh", "-c", outer, self.root, inner], env=self.environment, check=True)


def build(chroot: Chroot, arguments: dict[str, str]) -> None:
    """Run the instructions of the stage `plain`. `arguments` are build arguments."""
    for name, rest in instructions("plain"):
        print(f"\n== {name} {' '.join(rest.split())}", flush=True)
        started = time.monotonic()
        if name == "RUN":
            chroot.run(rest)
        elif name == "WORKDIR":
            chroot.directory = rest
            (chroot.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY" and rest == ". .":
            copy_context(chroot.root / chroot.directory.lstrip("/"))
        elif name in ("ENV", "ARG"):
            key, _, value = rest.partition("=")
            chroot.environment[key] = arguments.get(key, value) if name == "ARG" else value
        elif name != "CMD":
            sys.exit(f"This script does not know the instruction {name} {rest}. Add it.")
        print(f"== {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the root directory")
    parser.add_argument("--suite", default="bookworm", help="Debian release")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as of docker build")
    options = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin"):
        sys.exit("Run this script as root, after: apt-get install debootstrap")
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="megabench-root-"))
    try:
        make_root(root, options.suite)
        print(f"== the root took {time.monotonic() - started:.0f} s", flush=True)
        chroot = Chroot(root)
        build(chroot, dict(argument.split("=", 1) for argument in options.build_arg))
        chroot.directory = "/tmp"  # import the installed package, not the copied context
        chroot.run("megabench --version && " + TRAINING)
        print(f"\n== passed in {time.monotonic() - started:.0f} s")
    finally:
        if options.keep:
            print(f"The root is {root}.")
        else:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
