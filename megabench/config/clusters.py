"""Read clusters for planning: an instance type and a count, or a file. Loads no torch."""

from dataclasses import replace
from math import ceil
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from megabench import shipped
from megabench.hardware.gpus import Network
from megabench.hardware.topology import MOST_HOSTS, Host, Topology, build, from_cluster, instance_host, used_domain
from megabench.settings.reading import ConfigError, explain, read_yaml_mapping

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(gt=0, strict=True)]  # true is not 1


class Hosts(BaseModel):
    """A number of equal hosts of a cluster: instances of a known type, or a description of the hosts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    count: Count = Field(1, le=MOST_HOSTS)
    """Number of these hosts."""
    name: str | None = None
    """Prefix of the host names [default: the instance type, or host]."""
    instance: str | None = None
    """Instance type, which sets the defaults of the other fields."""
    gpu: str | None = None
    """Name of the GPU as CUDA reports it."""
    num_gpus: Count | None = Field(None, le=1024)
    """Number of GPUs per host [default: 8, or those of the instance ÷ hosts_per_server]."""
    hosts_per_server: Count = Field(1, le=1024)
    """Number of these hosts on one server, as for several pods on a Kubernetes node. They share its memory and NICs."""
    nvlink_domain: Count | None = None
    """Number of GPUs per NVLink domain; a multiple of num_gpus spans hosts [default: all GPUs of a host]."""
    nvlink_gb_per_s: PositiveFloat | None = None
    """NVLink bandwidth of one GPU in one direction, in GB/s."""
    network: Network | None = None
    """Network between the hosts [default: socket]."""
    network_gbits: PositiveFloat | None = None
    """Total bandwidth of a host's NICs, or of a server's with hosts_per_server, in Gbit/s."""
    ring_gbits: PositiveFloat | None = None
    """Bandwidth of a single NCCL ring per host, in Gbit/s [default: that of all NICs]."""

    def kind(self) -> tuple[Host, int, int]:
        """Return one of these hosts, its number of GPUs, and the number of GPUs per NVLink domain."""
        if self.hosts_per_server > 1 and not (self.instance or self.num_gpus):
            raise ConfigError(
                f"hosts_per_server={self.hosts_per_server} needs the number of GPUs of each host. Set num_gpus, e.g. "
                f"num_gpus: 1."
            )
        host, num_gpus = Host("host", "GPU", "pcie", "socket"), self.num_gpus or 8
        domain = num_gpus
        if self.instance:
            host, in_instance, domain = instance_host(self.instance)
            num_gpus = self.num_gpus or max(1, in_instance // self.hosts_per_server)
            if num_gpus > in_instance:
                raise ConfigError(
                    f"num_gpus={num_gpus} exceeds the {in_instance} GPUs of {self.instance}. Use a num_gpus of at most "
                    f"{in_instance}, or leave it out."
                )
            if num_gpus * self.hosts_per_server > in_instance:
                raise ConfigError(
                    f"hosts_per_server={self.hosts_per_server} with {num_gpus} GPUs each exceeds the {in_instance} "
                    f"GPUs of {self.instance}. Use a smaller num_gpus or hosts_per_server."
                )
            domain = used_domain(domain, in_instance, num_gpus)
        if self.hosts_per_server > 1:
            domain = min(domain, num_gpus)
            if (self.nvlink_domain or 0) > num_gpus:
                raise ConfigError(
                    f"nvlink_domain={self.nvlink_domain} spans several hosts, but NVLink does not connect the hosts of "
                    f"hosts_per_server={self.hosts_per_server}. Use an nvlink_domain of at most {num_gpus}."
                )
        host = Host(
            name=self.name or host.name,
            device=self.gpu or host.device,
            inside="pcie",
            network=self.network or host.network,
            network_gbits=self.network_gbits or host.network_gbits,
            nvlink_gb_per_s=self.nvlink_gb_per_s or host.nvlink_gb_per_s,
            ring_gbits=self.ring_gbits,
            instance_type=None if self.gpu or self.network else host.instance_type,
        )
        return host, num_gpus, self.nvlink_domain or domain


class ClusterFile(BaseModel):
    """The content of a cluster file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    description: str = ""
    """Description of the cluster in one sentence."""
    hosts: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_HOSTS)
    """List of hosts in rank order."""


def read_cluster(text: str) -> Topology:
    """Return the topology of "TYPE:COUNT[:GPUS]", of a YAML file, or of a shipped file with this name.

    Raises ConfigError or TopologyError for any other text.
    """
    path = shipped.find("clusters", text)
    if path.suffix not in (".yaml", ".yml"):
        return from_cluster(text)
    file = _validate(ClusterFile, read_yaml_mapping(path), str(path))
    hosts: list[tuple[Host, int, int]] = []
    starts: list[int] = []
    num_servers = 0
    for index, entry in enumerate(file.hosts):
        where = f"{path}: hosts[{index}]"
        some = _validate(Hosts, entry, where)
        try:
            host, num_gpus, domain = some.kind()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        starts.append(len(hosts))
        names = [f"{host.name}-{len(hosts) + number}" for number in range(some.count)]
        if some.hosts_per_server == 1:
            hosts += [(replace(host, name=name), num_gpus, domain) for name in names]
            continue
        for number, name in enumerate(names):
            server = f"server-{num_servers + number // some.hosts_per_server}"
            hosts.append((replace(host, name=name, server=server), num_gpus, domain))
        num_servers += ceil(some.count / some.hosts_per_server)
    return build(hosts, starts)


def names_network(text: str) -> bool:
    """Return whether a cluster's description names the network of all hosts, by an instance type or a field."""
    path = shipped.find("clusters", text)
    if path.suffix not in (".yaml", ".yml"):
        return True
    file = _validate(ClusterFile, read_yaml_mapping(path), str(path))
    return all(entry.get("network") or entry.get("instance") for entry in file.hosts)


def _validate(model: type[Model], content: dict[str, Any], where: str) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model.model_fields)}") from None
