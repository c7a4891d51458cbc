"""Sizes of models, against the parameter counts that their authors publish."""

import json
from pathlib import Path

import pytest
import yaml

from rlhf_lightning.config.schema import ModelConfig, ShapeConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.planning.shape import Linear, Shape, shape_of

PRESETS = Path(__file__).resolve().parents[2] / "conf" / "model"

# What the hub shows for each, and the share of it that the plan leaves out: norms of heads, lone biases.
PUBLISHED = {
    "gemma2_2b": (2_614_341_888, 2 * 26 * 2304),  # two more norms a layer
    "gemma_2b": (2_506_172_416, 0),
    "gpt2": (124_439_808, 0),
    "llama13b": (13_015_864_320, 0),
    "llama3_1b": (1_235_814_400, 0),
    "llama3_3b": (3_212_749_824, 0),
    "llama3_8b": (8_030_261_248, 0),
    "llama7b": (6_738_415_616, 0),
    "mistral_7b": (7_248_023_552, 0),
    "pythia_160m": (162_322_944, 0),
    "pythia_1b": (1_011_781_632, 0),
    "qwen25_0_5b": (494_032_768, 24 * (896 + 128 + 128)),  # biases of q, k and v
    "qwen25_1_5b": (1_543_714_304, 28 * (1536 + 256 + 256)),
    "qwen25_7b": (7_615_616_512, 28 * (3584 + 512 + 512)),
    "qwen3_0_6b": (596_049_920, 28 * 2 * 128),  # norms of q and k
    "qwen3_4b": (4_022_468_096, 36 * 2 * 128),
    "qwen3_8b": (8_190_735_360, 36 * 2 * 128),
    "smollm2_135m": (134_515_008, 0),
    "smollm2_1_7b": (1_711_376_384, 0),
    "smollm2_360m": (361_821_120, 0),
}


def preset(name: str) -> Shape:
    return Shape(ShapeConfig(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["shape"]), name)


def test_every_preset_is_here() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == {*PUBLISHED, "_defaults", "tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    published, left_out = PUBLISHED[name]
    assert preset(name).parameters == published - left_out


def test_four_bit_storage_by_hand() -> None:
    # 64 x 300 = 19,200 weights: 9,600 bytes of halves, 300 scales of a byte, 2 second scales of 4 bytes,
    # and 16 + 256 float32 of code books.
    linear = Linear("layers.0.mlp.up_proj", 64, 300, 0)
    assert linear.stored("nf4", 2) == 9600 + 300 + 8 + 1088
    assert linear.stored("none", 2) == 38_400


def test_llama_2_7b_by_hand() -> None:
    shape = preset("llama7b")
    linears = list(shape.linears())
    assert (len(linears), sum(one.weights for one in linears)) == (224, 6_476_005_376)
    # half a byte a weight, a byte for 64, four bytes for 64 x 256, and the code books of 224 layers
    four_bit = 3_238_002_688 + 101_187_584 + 1_581_056 + 224 * 1088
    embedding_head_norms = (2 * 32_000 * 4096 + 65 * 4096) * 2
    assert shape.stored("nf4", 2) == four_bit + embedding_head_norms
    assert shape.stored("none", 2) == 2 * 6_738_415_616


def write(folder: Path, **values: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig(path=str(folder), shape=preset("gpt2").sizes)


def test_a_folder_wins_over_the_settings(tmp_path: Path) -> None:
    model = write(
        tmp_path, model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
        intermediate_size=128, vocab_size=320, tie_word_embeddings=True,
    )  # fmt: skip
    shape = shape_of(model)
    assert shape.sizes == ShapeConfig(
        layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocab=320, tied=True
    )
    assert shape.source == str(tmp_path / "config.json")


def test_gpt2_has_names_of_its_own(tmp_path: Path) -> None:
    model = write(
        tmp_path, model_type="gpt2", n_layer=12, n_embd=768, n_head=12, n_positions=1024, vocab_size=50257
    )
    assert shape_of(model).parameters == 124_439_808


@pytest.mark.parametrize("values", [{"model_type": "mixtral"}, {"model_type": "llama", "hidden_size": 64}])
def test_a_folder_of_an_unknown_kind_leaves_it_to_the_settings(tmp_path: Path, values: dict) -> None:
    model = write(tmp_path, **values)
    assert shape_of(model).source == "model.shape (of tiny)"
    with pytest.raises(UserError, match=r"describes a model of another kind, so give model\.shape"):
        shape_of(model.model_copy(update={"shape": None}))


def test_an_unknown_model_asks_for_its_shape() -> None:
    with pytest.raises(UserError, match=r"a/b is no folder here, so give model\.shape"):
        shape_of(ModelConfig(path="a/b"))
