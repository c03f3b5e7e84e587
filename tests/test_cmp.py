from pathlib import Path

import pytest
import torch

from megabench.models.folder import HuggingFaceWeights
from tests import distributed
from tests.models.tiny import CATALOG, save_model


def job(folder, tp, pp):
    from megabench.convert.compare import compare, comparison_run

    w = HuggingFaceWeights(Path(folder))
    run = comparison_run(folder, tp, pp)
    t = torch.randint(0, w.shape.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    return compare(w, w, run, t, lambda s: None)


@pytest.mark.parametrize("tp,pp", [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["llama31-tiny", "llama32-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_it(tmp_path, name, tp, pp):
    save_model(tmp_path / "m", CATALOG[name].with_layers(3))
    c = distributed.run(job, tp * pp, str(tmp_path / "m"), tp, pp)
    print(c[0])
    assert c[0].is_equal and c[0] == c[-1]
