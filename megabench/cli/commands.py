"""The commands of `megabench`. Each command imports its modules when it runs, so that --help is fast."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand
from typer.main import get_command

from megabench import __version__, shipped
from megabench.cli.suggestions import SuggestingGroup
from megabench.errors import UserError, error_message
from megabench.runtime.launcher import check_launcher, forget_single_pod, launcher_rank, refuse_num_processes
from megabench.runtime.process import end, set_up_process

# base class of command-line errors, which typer does not export
_UsageError = cast(type[Exception], typer.BadParameter.__base__)

_MOST_LOCAL_RANKS = 1024
_LAYOUTS_BESIDE_TRAINER = 3

# options of several commands
_StudyProcesses = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MOST_LOCAL_RANKS,
        help="Number of processes [default: the number of GPUs, else the study's world_size].",
    ),
]
_EmulateHosts = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Divide this machine's ranks into N emulated hosts that communicate over sockets."
    ),
]
_Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages.")]
_Vp = Annotated[int, typer.Option(min=1, help="Model chunks per pipeline stage.")]
_Cp = Annotated[int, typer.Option(min=1, help="Context-parallel size.")]
_Fabric = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Measured network between hosts: output of nccl-tests, or a profile of megabench calibrate on several "
        "hosts.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]

# commands in modules that take about a second to import, with their summaries
_MODULES = {
    "train": "Train one model under one layout.",
    "convert": "Convert checkpoints from and to Hugging Face format.",
    "preprocess": "Tokenize text into a token file.",
}


class _Commands(SuggestingGroup):
    """The commands of this module and of the modules in `_MODULES`, which are imported when they run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_MODULES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        summary = _MODULES.get(cmd_name)
        return TyperCommand(cmd_name, help=summary) if summary else super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _MODULES:
            command = get_command(import_module(f"megabench.cli.{name}").app)
        return name, command, rest


app = typer.Typer(
    cls=_Commands,
    help="Find the parallel layout that trains fastest on this cluster, compare it with ZeRO-3, and train with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"megabench {__version__}")
        raise typer.Exit


@app.callback()
def _megabench(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Find the parallel layout that trains fastest."""


@app.command()
def compare(
    study: Annotated[
        Path | None,
        typer.Argument(
            metavar="STUDY",
            help="A study file, or the name of a shipped study (--list).",
            autocompletion=lambda: shipped.names("studies"),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Output directory for records, table, logs and TensorBoard scalars [default: runs/STUDY].",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the shipped studies.")] = False,
    nproc: _StudyProcesses = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only the trials that have no successful record yet.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only the trials with this name or pattern. Can be repeated."),
    ] = None,
    emulate_hosts: _EmulateHosts = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[TRIAL.]FIELD=VALUE",
            help="Set a field of all trials that do not set it themselves, or, with TRIAL, of the trials with this "
            "name or pattern. Can be repeated.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Run every trial N times, in rounds of all trials."),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Then repeat the fastest trials, until each of them ran at least 3 times and the first place is "
            "decided, or the time is used up.",
        ),
    ] = False,
    max_minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Minutes for the additional runs of --confirm [default: 60].")
    ] = None,
    locate: Annotated[
        str | None,
        typer.Option(
            metavar="TRIAL",
            help="Run this trial and the reference for four steps, also in fp32 and with the reference kernels, to "
            "tell rounding from an error.",
        ),
    ] = None,
    plan: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also run the N layouts that are predicted to be fastest.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE:COUNT[:GPUS]|FILE|NAME",
            help="Cluster for which --plan predicts [default: this machine]. With --dry-run, also predict the study's "
            "duration there.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Profile written by megabench calibrate, for --plan.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|COMMAND",
            help="Instead of STUDY: compare a configuration of HF Trainer with the same method at its best and with "
            f"the {_LAYOUTS_BESIDE_TRAINER} best predicted layouts. FILE is a JSON file with TrainingArguments, and "
            'COMMAND a script with its arguments, e.g. "train.py --bf16 True", which runs until it starts to train.',
        ),
    ] = None,
    deepspeed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The DeepSpeed JSON of --trainer [default: the one it names].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help="The model of --trainer [default: the script's; llama3-8b]."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the study and print each run's command.")] = False,
) -> None:
    """Run the trials of a study, each in fresh processes, and rank them against ZeRO-3.

    With --plan N, the study also runs the N layouts with the best predictions.

    On one machine: megabench compare STUDY. On several nodes, run on each node: torchrun --nnodes N --nproc-per-node G
    … -m megabench compare STUDY --out DIR. The exit status is 0 if every trial is ok, 1 if any trial is not ok, and 2
    if the study cannot be run.
    """
    from megabench.study.compare_request import find_study, show_studies

    if show_list:
        from megabench.terminal import standard_output

        if study:
            raise UserError(
                f"--list shows all shipped studies; leave out {study}, or use --dry-run to show its commands"
            )
        if launcher_rank() in (None, 0):
            show_studies(standard_output())
        return
    if trainer:
        from megabench.hardware.facts import gpu_names

        if study:
            raise UserError(f"--trainer makes a study of its own; leave out {study} or --trainer")
        study = _trainer_study(trainer, deepspeed, model, out, nproc, settings or [])
        if plan is None and gpu_names():
            plan = _LAYOUTS_BESIDE_TRAINER
    elif deepspeed or model:
        raise UserError(f"{'--deepspeed' if deepspeed else '--model'} works only with --trainer FILE.")
    if study is None:
        raise UserError("no study was given. Use a study file or a name, e.g. megabench compare quickstart, or --list.")
    from megabench.study.compare_request import Request
    from megabench.study.planned_trials import Planning

    if plan is None and profile:
        raise UserError("--profile works only with --plan N.")
    if plan is None and cluster and not dry_run:
        raise UserError("--cluster works only with --plan N or --dry-run.")
    planning = Planning(plan, cluster, profile) if plan else None
    source = find_study(study)
    excluded = {"--only": only, "--plan": plan, "--repeats": repeats, "--confirm": confirm} if locate else {}
    if given := [name for name, value in excluded.items() if value]:
        raise UserError(f"--locate {locate} runs only this trial and the reference; leave out {given[0]}")
    request = Request(
        source,
        out or Path("runs", f"{source.stem}-locate-{locate}" if locate else source.stem),
        resume,
        tuple(only or ()),
        emulate_hosts,
        planning,
        tuple(settings or ()),
        repeats,
        confirm,
        max_minutes,
        locate,
    )
    if launcher_rank() is not None:
        if planning and not cluster:
            raise UserError("--plan under torchrun needs --cluster, e.g. --cluster p5.48xlarge:4 for four such nodes")
        refuse_num_processes(nproc)
        if dry_run:
            raise UserError(
                "--dry-run starts no processes. Run megabench compare without torchrun, with --nproc N for N processes."
            )
        check_launcher(0)
        from megabench.comparison.runner import run_launched

        sys.exit(run_launched(request))
    planned, num_processes = request.plan_here(nproc, starts=not dry_run)
    if dry_run:
        from megabench.terminal import standard_output

        topology = None
        if cluster:
            from megabench.config.clusters import read_cluster

            topology = read_cluster(cluster)
        lines = [planned.outline(request.only, topology)]
        if topology:
            from megabench.doctor.duration import predicted_duration

            lines.append(predicted_duration(planned.select(request.only), topology))
        standard_output().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        return
    from megabench.comparison.runner import run_here

    sys.exit(run_here(request, planned, num_processes))


def _trainer_study(
    trainer: str, deepspeed: Path | None, model: str | None, out: Path | None, nproc: int | None, settings: list[str]
) -> Path:
    """Write the study of a configuration of HF Trainer beside its output directory, and return its path."""
    from megabench.hardware.facts import gpu_names
    from megabench.study.from_trainer import write_script_study, write_trainer_study
    from megabench.study.trainer_script import script_command

    if launcher_rank() is not None:
        raise UserError(
            "--trainer works on one machine. Write the study with --trainer, --nproc N and --dry-run, and give its "
            "file to megabench compare under torchrun."
        )
    if not (size := nproc or len(gpu_names())):
        raise UserError("--trainer needs the number of processes, because no NVIDIA GPU was found; add --nproc N")
    command = script_command(trainer)
    folder = (out or Path("runs", Path(command[0] if command else trainer).stem)).absolute()
    path = folder.with_name(f"{folder.name}.yaml")
    if command is None:
        write_trainer_study(path, Path(trainer), deepspeed, model, size)
    elif deepspeed:
        raise UserError(f"--deepspeed is an argument of {command[0]} here; write it inside the quotes of --trainer")
    else:
        needs_length = not any(setting.startswith("seq_length=") for setting in settings)
        print(write_script_study(path, command, model, size, needs_length))
    print(f"study: {path}")
    return path


@app.command()
def doctor(
    path: Annotated[
        Path, typer.Argument(metavar="DIR|STUDY", help="Directory with records, a study file, or a shipped study.")
    ],
    nproc: _StudyProcesses = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE:COUNT[:GPUS]|FILE|NAME", help="Cluster on which the study will run [default: this machine]."
        ),
    ] = None,
    fabric: _Fabric = None,
    as_json: _Json = False,
) -> None:
    """Report what makes a study's numbers untrustworthy, preliminary or slow, with evidence and a remedy.

    Reads the records of compare or train, or checks a study before it runs: with predictions, it reports trials that do
    not fit into GPU memory, and layouts that are faster than all trials. The worst comes first. The exit status is 1 if
    a trial is predicted to fail, 2 if there are no records, and otherwise 0, with or without findings.
    """
    from megabench.doctor.write_findings import findings_at, write
    from megabench.study.compare_request import find_study
    from megabench.terminal import standard_output

    source = path if path.is_dir() else find_study(path, "directory, study file")
    findings = findings_at(source, nproc, cluster, fabric)
    write(standard_output(), findings, as_json)
    sys.exit(1 if any(finding.kind == "fails" for finding in findings) else 0)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The --out directory of megabench compare or megabench train.")
    ],
    beside: Annotated[
        Path | None, typer.Option("--compare", metavar="DIR2", help="A second study, shown next to the first.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page [default: DIR/report.html].")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Also write the records' scalars as TensorBoard event files.")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(min=1, max=1e18, metavar="N", help="Show the days of a training run of N tokens, e.g. 15e12."),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, metavar="PRICE", help="Also show the cost of that run, in any currency."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help="Columns of the printed table: all, or names. A wrong name lists the names."
        ),
    ] = None,
) -> None:
    """Answer the question of a study, print its table, and write its report as one self-contained HTML page.

    Without --out and --compare, DIR/summary.csv is written, too. The exit status is 2 if DIR contains no study.
    """
    from megabench.doctor import examine
    from megabench.report import write_report
    from megabench.study.results_directory import read_folder
    from megabench.study.summary import Budget, write_csv
    from megabench.study.table import show
    from megabench.terminal import standard_output

    budget = Budget(tokens or Budget.num_tokens, price_per_gpu_hour) if tokens or price_per_gpu_hour else None
    path, study = out or folder / "report.html", read_folder(folder, budget)
    second = read_folder(beside, budget) if beside else None
    if tensorboard:
        from megabench.comparison.tensorboard_export import check_output, export_records

        check_output(tensorboard)
        number = export_records(study.records, tensorboard)
    for shown in (study, second) if second else (study,):
        if second:
            print(f"{shown.name}:")
        chosen = columns.split(",") if columns else ()
        show(standard_output(), shown.records, shown.reference, shown.answers, shown.budget, chosen, shown.confirm)
    write_report(path, study, examine(study.records, study.reference), second)
    if out is None and second is None:
        write_csv(folder / "summary.csv", study.records, study.reference)
    print(path)
    if tensorboard:
        print(f"{tensorboard}: the scalars of {number} runs, for tensorboard --logdir {tensorboard}")


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The --out directory of megabench compare.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The archive [default: DIR.tar.gz].")] = None,
) -> None:
    """Write a study's records and their evidence to one archive, without logs, tensors and secrets.

    The archive contains the study file, the records, the environment, and a summary of NCCL's transports.
    """
    from megabench.study.archive import pack

    path = folder.absolute()
    archive = out or path.with_name(f"{path.name}.tar.gz")
    pack(folder, archive)
    print(archive)


@app.command()
def unpack(
    archive: Annotated[Path, typer.Argument(metavar="FILE", help="An archive written by megabench pack.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="New directory [default: runs/STUDY].")] = None,
) -> None:
    """Check an archive of megabench pack, write its files to a new directory, and describe the study in README.md."""
    from megabench.study.archive import unpack

    print(unpack(archive, out))


@app.command()
def parity(
    ours: Annotated[Path, typer.Argument(metavar="FILE", help="Sketches of a run, written with --sketches FILE.")],
    theirs: Annotated[Path, typer.Argument(metavar="REFERENCE", help="Sketches of the run to compare with.")],
) -> None:
    """Compare the gradients, weights and second moments of two runs.

    The exit status is 0 if all tensors are equal up to rounding, 1 if any tensor differs, and 2 if the files cannot be
    compared.
    """
    from megabench.tensor_parity import compare_files, verdict
    from megabench.terminal import standard_output

    found = compare_files(ours, theirs)
    standard_output().print(verdict(found), markup=False, highlight=False, soft_wrap=True)
    sys.exit(1 if found.problems else 0)


@app.command()
def topo(
    cluster: Annotated[
        str | None,
        typer.Option(metavar="TYPE:COUNT[:GPUS]|FILE|NAME", help="Cluster to plan for [default: this machine]."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_LOCAL_RANKS, help="Number of ranks on this machine [default: one per GPU]."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    pp: _Pp = 1,
    vp: _Vp = 1,
    cp: _Cp = 1,
    placement: Annotated[str, typer.Option(metavar="topology|launcher|spread-tp", help="How ranks are placed.")] = (
        "topology"
    ),
    strict_placement: Annotated[
        bool, typer.Option("--strict-placement", help="Exit with an error if a TP group spans NVLink domains.")
    ] = False,
    emulate_hosts: _EmulateHosts = None,
    model: Annotated[str | None, typer.Option(help="Also check that this model can be divided by the layout.")] = None,
    fabric: _Fabric = None,
    as_json: _Json = False,
) -> None:
    """Show hosts, NVLink domains and GPUs, and the links of a layout's process groups.

    Describes this machine, the ranks of a launch (torchrun … -m megabench topo), or a cluster for planning. The
    exit status is 2 if the layout is impossible. With --fabric, also shows how fast the measured network is.
    """
    from megabench import topo as drawing
    from megabench.cost.fabric_files import read_fabric
    from megabench.models.find import find_model
    from megabench.parallel.layout import Layout
    from megabench.parallel.placement import place

    if cluster and nproc:
        raise UserError(f"--nproc {nproc} and --cluster {cluster} are mutually exclusive. Omit one of them.")
    policy = drawing.read_policy(placement)
    asked = Layout(tp=tp, cp=cp, pp=pp, vp=vp)
    topology = drawing.find_topology(cluster, nproc, asked, launcher_rank() is not None, emulate_hosts)
    layout = asked.with_world_size(topology.world_size)
    if model:
        shape = find_model(model)
        layout.check_model(shape, shape.seq_length)
    placed = place(topology, layout, policy, strict_placement)
    if launcher_rank() in (None, 0):
        measured = read_fabric(fabric) if fabric else None
        if measured:
            measured.check(topology)
        drawing.write(placed, layout, as_json, measured)


@app.command()
def transport(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="NCCL logs (NCCL_DEBUG=INFO), outputs of nvidia-smi topo -m or nvlink -s, or NCCL topology XML files.",
        ),
    ],
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size [default: the GPUs of a host].")] = None,
    pp: _Pp = 1,
    vp: _Vp = 1,
    cp: _Cp = 1,
    as_json: _Json = False,
) -> None:
    """Report the transports between GPUs from existing logs, and draw which process groups use them.

    Several NCCL logs, for example one per pod, are merged into one job. The exit status is 2 for an unreadable file or
    an impossible layout.
    """
    from megabench import transport_summary
    from megabench.parallel.layout import Layout
    from megabench.terminal import standard_output

    layout = Layout(tp=tp or 1, cp=cp, pp=pp, vp=vp)
    transport_summary.write(standard_output(), files, layout, default_tp=tp is None, as_json=as_json)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file: the profile for megabench plan --profile.")],
    model: Annotated[str, typer.Option(help="Model whose matrix product sizes are timed.")] = "llama3-8b",
    seq_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence [default: the model's].")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MOST_LOCAL_RANKS, help="Number of ranks on this machine [default: one per GPU; 2 without GPUs]."
        ),
    ] = None,
    emulate_hosts: _EmulateHosts = None,
) -> None:
    """Measure matrix products, attention, memory, launches, collectives and host copies in about a minute.

    Starts one process per GPU. On several nodes, also measures the network between them: torchrun … -m megabench
    calibrate --out FILE.
    """
    from megabench.calibrate.measure import run

    run(out, model, seq_length, nproc, emulate_hosts)


@app.command()
def plan(
    model: Annotated[
        str | None, typer.Option(help="Model name, or a Hugging Face or checkpoint directory [default: llama3-8b].")
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:COUNT[:GPUS]|FILE|NAME",
            help="Cluster to plan for [default: this machine]. Can be repeated to compare clusters.",
        ),
    ] = None,
    seq_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence [default: the model's].")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per optimizer step [default: the model's].")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Number of layers; overrides the model's.")] = None,
    grad_dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16", help="Dtype in which gradients are accumulated and reduced.")
    ] = "fp32",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Training dtype: bf16, fp16, fp8 (products inside blocks) or fp32 [default: bf16; fp32 on CPU].",
        ),
    ] = None,
    fp8_recipe: Annotated[
        str | None,
        typer.Option(
            metavar="tensorwise|bf16-gradients",
            help="Products in fp8: all, or only those of the forward pass [default: tensorwise].",
        ),
    ] = None,
    num_layers_at_start_in_bf16: Annotated[
        int, typer.Option(min=0, help="Number of first blocks that fp8 runs keep in bf16.")
    ] = 0,
    num_layers_at_end_in_bf16: Annotated[
        int, typer.Option(min=0, help="Number of last blocks that fp8 runs keep in bf16.")
    ] = 0,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Optimizer, with its state and update: adamw, sgd, adafactor or muon.")
    ] = "adamw",
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile written by megabench calibrate [default: a shipped profile]."),
    ] = None,
    fabric: _Fabric = None,
    top: Annotated[int | None, typer.Option(min=1, help="Number of layouts to show [default: 5].")] = None,
    emulate_hosts: _EmulateHosts = None,
    explain: Annotated[
        str | None, typer.Option(metavar="TRIAL", help="Show the time of each part of one trial's step.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Compare your own layout with the best one, e.g. "tp8 pp2", "zero3" or "fsdp mb2 full". What the text '
            "leaves open is chosen for speed.",
        ),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS|FILE",
            help="Measured step of --layout: seconds, or a log of HF Trainer or DeepSpeed. Says what may explain the "
            "difference from the prediction.",
        ),
    ] = None,
    shows_map: Annotated[
        bool,
        typer.Option(
            "--map",
            help="Show the best layout by model and number of hosts, up to the hosts of --cluster. --model takes names "
            "separated by commas [default: the Llama 3 models].",
        ),
    ] = False,
    tokens: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=1e18,
            help="Tokens of the whole training, to predict its days [default: 100e9 for several clusters and prices].",
        ),
    ] = None,
    price_per_gpu_hour: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1e9,
            metavar="PRICE",
            help="Also show the price of the whole training, in any currency. Repeat it for each --cluster.",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Predict the step time of every layout, ZeRO, FSDP2 and DDP on a cluster, and name the best one.

    With several clusters, compare the best layout of each cluster, and explain the ratios of their speeds. The exit
    status is 0 if a layout fits on every cluster, 1 if no layout fits on one, and 2 for invalid input.
    """
    from functools import partial

    from megabench.planner import compare_clusters, plan_json, plan_table, size_map
    from megabench.planner.explain import explain as write_explanation
    from megabench.planner.layout_table import Training
    from megabench.planner.make_plan import make_plan
    from megabench.planner.own_layout_report import OwnLayoutReport
    from megabench.terminal import standard_output

    modes = {"--explain": explain is not None, "--layout": layout is not None, "--map": shows_map}
    _check_plan_options([name for name, is_given in modes.items() if is_given], cluster or [], fabric)
    unused = {"--top": top, "--tokens": tokens, "--price-per-gpu-hour": price_per_gpu_hour} if shows_map else {}
    if given := [name for name, value in unused.items() if value]:
        raise UserError(f"--map does not use {given[0]}. Omit one of them.")
    top = top or 5
    if measured is not None and layout is None:
        raise UserError('--measured needs the layout that was measured, e.g. --layout "zero3 mb1".')
    num_clusters = len(cluster or [None])
    prices: list[float | None] = [*price_per_gpu_hour] if price_per_gpu_hour else [None]
    if len(prices) not in (1, num_clusters):
        raise UserError(
            f"--price-per-gpu-hour is given {len(prices)} times for {num_clusters} clusters. Give one price, or one "
            f"for each --cluster."
        )
    prices = prices if len(prices) == num_clusters else prices * num_clusters
    trainings = [Training(tokens or Training.num_tokens, price) for price in prices]
    training = trainings[0] if tokens or price_per_gpu_hour else None
    make = partial(
        make_plan,
        seq_length=seq_length,
        num_layers=num_layers,
        grad_dtype=grad_dtype,
        profile=profile,
        top=max(top, plan_table.MOST_TOLD),
        emulate_hosts=emulate_hosts,
        precision=precision,
        fp8_recipe=fp8_recipe,
        num_layers_at_start_in_bf16=num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=num_layers_at_end_in_bf16,
        fabric=fabric,
        optimizer=optimizer,
    )
    console = standard_output()
    if shows_map and cluster:
        models = size_map.MODELS if model is None else model
        cells = size_map.make_map(models, cluster[0], global_batch, make)
        print(size_map.map_as_json(cells)) if as_json else size_map.write_map(console, cells, cluster[0])
        return
    name = "llama3-8b" if model is None else model
    if cluster and len(cluster) > 1:
        plans = compare_clusters.make_plans(cluster, trainings, lambda one: make(name, one, global_batch=global_batch))
        if as_json:
            print(compare_clusters.as_json(plans, top))
        else:
            compare_clusters.write(console, plans)
        sys.exit(0 if all(one.plan.ranked for one in plans) else 1)
    found = make(name, cluster[0] if cluster else None, global_batch=global_batch)
    if layout is not None:
        report = OwnLayoutReport(found, layout, measured)
        print(report.as_json(training)) if as_json else report.write(console, training)
    elif as_json:
        print(plan_json.as_json(found, top, explain, training))
    elif explain is not None:
        write_explanation(console, found, explain, training)
    else:
        plan_table.write(console, found, top, training)
    sys.exit(0 if found.ranked else 1)


def _check_plan_options(modes: list[str], clusters: list[str], fabric: Path | None) -> None:
    """Raise UserError if options of `plan` contradict each other. `modes` are those that replace the usual output."""
    if len(modes) > 1:
        raise UserError(f"{modes[0]} and {modes[1]} show different things. Omit one of them.")
    if modes and len(clusters) > 1:
        raise UserError(
            f"{modes[0]} needs a single cluster and does not work with several --cluster. Omit one of them."
        )
    if fabric and len(clusters) > 1:
        raise UserError(f"--fabric {fabric} describes one network. Use it with one --cluster.")
    if "--map" in modes and not clusters:
        raise UserError("--map needs the largest cluster, e.g. --cluster p5.48xlarge:64.")


def main(command: str | None = None) -> NoReturn:
    """Run the command line, or the arguments of one command, and exit. A UserError is printed as one message.

    Under a launcher, all ranks have the same command line, so only rank 0 prints the message.
    """
    arguments = [command, *sys.argv[1:]] if command else None
    prints_errors = True
    status = 0
    try:
        forget_single_pod()
        prints_errors = launcher_rank() in (None, 0)
        set_up_process(sys.argv[1:])
        app(arguments, prog_name="megabench", standalone_mode=prints_errors)
    except (UserError, OSError) as error:
        if prints_errors:
            print(f"Error: {error_message(error)}", file=sys.stderr)
        status = error.exit_status if isinstance(error, UserError) else 2
    except _UsageError:
        status = 2
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        status = ended.code
    end(status)
