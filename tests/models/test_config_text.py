"""The config.json of models of the catalogue, for transformers 4 and 5."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from megabench.models.hugging_face import CONFIG_NAME, config_text, read_shape, transformers_config
from tests.models.tiny import CATALOG, FAMILIES


@pytest.mark.parametrize("name", [*FAMILIES, "llama3-405b", "gpt2-tiny", "bloom-tiny"])
def test_both_forms_of_the_rotary_embedding(tmp_path: Path, name: str) -> None:
    shape = CATALOG[name]
    (tmp_path / CONFIG_NAME).write_bytes(config_text(shape))
    content = json.loads((tmp_path / CONFIG_NAME).read_text())
    if shape.family in ("gpt2", "bloom"):
        assert not [field for field in content if field.startswith("rope")]
    else:
        assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == shape.rope_theta
    scaling = {"rope_type": "llama3", **vars(shape.rope_scaling)} if shape.rope_scaling else None
    assert content.get("rope_scaling") == scaling
    assert content["tie_word_embeddings"] is shape.tied_embeddings
    # transformers 5 reads the same model from the whole file, from its own fields and from those of transformers 4
    expected = transformers_config(shape).to_dict() | {"use_cache": True, "architectures": content["architectures"]}
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == expected | {"_name_or_path": str(tmp_path)}
    older = {field: value for field, value in content.items() if field != "rope_parameters"}
    newer = {field: value for field, value in content.items() if field not in ("rope_theta", "rope_scaling")}
    assert AutoConfig.for_model(**older).to_dict() == AutoConfig.for_model(**newer).to_dict() == expected
    if shape.table.has_parallel_blocks:
        found = read_shape(tmp_path)
        assert (found.rope_theta, found.rope_scaling, found.foreign) == (shape.rope_theta, shape.rope_scaling, None)
