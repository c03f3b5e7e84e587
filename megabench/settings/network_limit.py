"""The value of the setting `emulate_network`: the bandwidth and the latency of the network between emulated hosts."""

from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megabench.record import Transport
from megabench.settings.reading import parse_yaml


class NetworkLimit(BaseModel):
    """What each host may send, and also receive, and the delay of each packet.

    `gb_per_s` is in 10^9 bytes per second, and `latency_us` in microseconds. `transport` is how the hosts communicate:
    over sockets, or on GPUs over shared memory, which is faster. In YAML and in flags, the value is a mapping such as
    {gb_per_s: 1.5}. A configuration holds the text, from which it can be read again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gb_per_s: Annotated[float, Field(ge=0.01, le=1000, strict=True)]
    latency_us: Annotated[int, Field(ge=0, le=100_000, strict=True)] = 0
    transport: Transport = "sockets"

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: Any) -> Self:
        """Read a mapping, or the YAML text of one, and refuse everything else in one sentence."""
        try:
            limit: Self = handler(parse_yaml(value) if isinstance(value, str) else value)
        except (ValidationError, yaml.YAMLError, ValueError):
            raise PydanticCustomError(
                "sentence",
                "emulate_network={value} is no bandwidth and latency; use a mapping such as {example}, with 0.01 to "
                "1000 GB/s, an integer from 0 to 100000 as latency_us, and sockets or shared_memory as transport",
                {"value": str(value), "example": "{gb_per_s: 1.5, latency_us: 50}"},
            ) from None
        return limit

    @model_serializer
    def __str__(self) -> str:
        latency = f", latency_us: {self.latency_us}" if self.latency_us else ""
        transport = "" if self.transport == "sockets" else f", transport: {self.transport}"
        return f"{{gb_per_s: {self.gb_per_s:.10g}{latency}{transport}}}"

    @property
    def short(self) -> str:
        """The values for the name of a trial, such as "1.5", "1.5-50us" or "25-50us-shared_memory"."""
        latency = f"-{self.latency_us}us" if self.latency_us else ""
        return f"{self.gb_per_s:.10g}{latency}" + ("" if self.transport == "sockets" else f"-{self.transport}")
