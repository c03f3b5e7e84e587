"""Check the input of the planner: a job, a topology and a profile. Loads no torch."""

from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from megabench.config import ConfigError, RunConfig
from megabench.config.clusters import names_network
from megabench.cost.fabric_files import read_fabric
from megabench.cost.job import Job
from megabench.cost.profile import profile_for, read_profile
from megabench.models.find import find_model
from megabench.optim.optimizers import OPTIMIZERS
from megabench.parallel.layout import Layout
from megabench.planner.search import MeasuredNetwork, Plan, plan
from megabench.precision import POLICIES, Fp8Recipe
from megabench.specs.fp8_check import check_fp8_settings
from megabench.specs.optimizer_check import check_optimizer


def make_plan(
    model: str,
    cluster: str | None,
    seq_length: int | None,
    global_batch: int | None,
    num_layers: int | None,
    grad_dtype: str,
    profile: Path | None,
    top: int,
    emulate_hosts: int | None,
    num_processes: int | None = None,
    precision: str | None = None,
    fp8_recipe: str | None = None,
    num_layers_at_start_in_bf16: int = 0,
    num_layers_at_end_in_bf16: int = 0,
    fabric: Path | None = None,
    emulated_gb_per_s: float | None = None,
    optimizer: str = "adamw",
) -> Plan:
    """Return the plan for a model on a cluster, or on `num_processes` of this machine.

    The default precision is bf16 on GPUs and fp32 on CPUs. `fabric` is a file with measured collectives between hosts.
    `emulated_gb_per_s` is the bandwidth of each emulated host, if it is limited.

    Raises UserError for invalid input.

    A machine without GPUs needs a profile from `calibrate`.
    """
    from megabench.topo import find_topology

    for name, value in (("seq_length", seq_length), ("global_batch", global_batch), ("top", top)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be a positive number")
    RunConfig.parse({"seq_length": seq_length, "global_batch": global_batch, "num_layers": num_layers})
    if grad_dtype not in ("fp32", "bf16"):
        raise ConfigError(f"grad_dtype={grad_dtype!r} is unknown; use fp32 or bf16")
    if precision is not None and precision not in POLICIES:
        raise ConfigError(f"precision={precision!r} is unknown; use {', '.join(POLICIES)}")
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer!r} is unknown; use {', '.join(OPTIMIZERS)}")
    if fp8_recipe is not None and fp8_recipe not in get_args(Fp8Recipe):
        raise ConfigError(f"fp8_recipe={fp8_recipe!r} is unknown; use {' or '.join(get_args(Fp8Recipe))}")
    shape = find_model(model, num_layers)
    topology = find_topology(cluster, num_processes, Layout(), False, emulate_hosts, emulated_gb_per_s)
    device = topology.hosts[0].device
    if device == "cpu" and not profile:
        raise ConfigError(
            "this machine has no GPU to plan for; use --cluster, e.g. --cluster p5.48xlarge:4, or --profile with a "
            "profile that megabench calibrate has measured"
        )
    length = seq_length or shape.seq_length
    if shape.max_seq_length and length > shape.max_seq_length:
        raise ConfigError(
            f"seq_length={length} exceeds the {shape.max_seq_length} positions of {model}; use a smaller seq_length"
        )
    precision = precision or ("fp32" if device == "cpu" else "bf16")
    if grad_dtype not in POLICIES[precision].grad_dtypes:
        raise ConfigError(f"grad_dtype={grad_dtype} does not work with precision={precision}; use grad_dtype=fp32")
    check_optimizer(optimizer, shape)
    check_fp8_settings(shape, precision, fp8_recipe, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16)
    job = Job(
        shape=shape,
        seq_length=length,
        global_batch=global_batch or shape.global_batch,
        precision=precision,
        bytes_of_gradient=4 if grad_dtype == "fp32" else 2,
        fp8_recipe=cast(Fp8Recipe, fp8_recipe or "tensorwise"),
        num_layers_at_start_in_bf16=num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=num_layers_at_end_in_bf16,
        optimizer=optimizer,
    )
    expected = read_profile(profile) if profile else profile_for(device)
    if fabric is None:
        assumes_sockets = cluster is not None and len(topology.hosts) > 1 and not names_network(cluster)
        return replace(plan(job, topology, expected, keep=top), assumes_sockets=assumes_sockets)
    # a profile that calibrate has measured on these hosts may contain the same slow network
    link = topology.hosts[0].network
    expected = expected.model_copy(update={"links": expected.links | {link: profile_for(device).links[link]}})
    measured = read_fabric(fabric)
    measured.check_fit(topology)
    network = MeasuredNetwork(measured, expected, measured.bandwidths(expected, topology))
    found = plan(job, topology, measured.profile_on(expected, topology), keep=top)
    return replace(found, network=network)
