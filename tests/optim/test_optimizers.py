"""Optimizers: what the table says of records, and the two parts of Muon."""

from pathlib import Path

import pytest
import torch
from torch import nn

from megabench.config import ConfigError, RunConfig
from megabench.engines.base import EngineError
from megabench.engines.common.optim import MuonWithAdamW
from megabench.engines.common.transformers_model import build_optimizer
from megabench.errors import UserError
from megabench.optim.optimizers import OPTIMIZERS, title_of
from megabench.planner.make_plan import make_plan
from megabench.planner.predict import job_of
from tests.models.causal_families import MODELS, save_model
from tests.study.records import make_record


def test_a_record_may_name_an_unknown_optimizer() -> None:
    assert title_of("lion") == "lion"
    with pytest.raises(UserError, match="the optimizer lion of trial a is unknown"):
        job_of(make_record([1.0], 1000, trial="a", optimizer="lion"))


def test_an_optimizer_is_never_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the table alone does not make an engine train with AdamW."""
    monkeypatch.setitem(OPTIMIZERS, "lion", OPTIMIZERS["adamw"])
    given = {"model": "llama-tiny", "optimizer": "lion"}
    with pytest.raises(ConfigError, match="the megatron engine has no optimizer=lion; use optimizer=adamw or sgd, or"):
        RunConfig.parse(given).resolve(1, "cpu")
    run = RunConfig.parse(given | {"engine": "ddp"}).resolve(1, "cpu")
    with pytest.raises(EngineError, match="the optimizer lion is not implemented"):
        build_optimizer(run, [("model.norm.weight", nn.Parameter(torch.ones(4)), 1)])


@pytest.mark.parametrize("learning_rate", [0.0, 0.1])
def test_muon_and_adamw_follow_the_learning_rate_of_a_step(learning_rate: float) -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    others = [{"params": [vector], "weight_decay": 0.0}]
    optimizer = MuonWithAdamW([{"params": [matrix], "weight_decay": 0.1}], others, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    matrix.grad, vector.grad = torch.randn(4, 4), torch.randn(4)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    assert all(bool((parameter == 1).all()) == (learning_rate == 0) for parameter in (matrix, vector))


def test_muon_refuses_a_model_whose_layers_no_table_lists(tmp_path: Path) -> None:
    save_model(tmp_path, MODELS["falcon"])
    run = RunConfig.parse({"model": str(tmp_path), "engine": "ddp", "optimizer": "muon", "seq_length": 16})
    with pytest.raises(ConfigError, match=r"does not know which parameters of .* they are"):
        run.resolve(1, "cpu")
    with pytest.raises(ConfigError, match=r"does not know which parameters of .* they are"):
        make_plan(str(tmp_path), "p5.48xlarge:1", 16, 8, None, "fp32", None, 12, None, optimizer="muon")
