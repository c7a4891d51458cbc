"""Phases, cards and advice: hand-worked numbers, and identities between plans."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_lightning.config.composing import Command
from rlhf_lightning.config.preflight import plan as judge
from rlhf_lightning.config.schema import Config
from rlhf_lightning.planning.advice import advise
from rlhf_lightning.planning.cards import CARDS, judge_cards
from rlhf_lightning.planning.plan import Plan, make_plan
from rlhf_lightning.planning.show import show_plan

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def composed(*tokens: str) -> Config:
    return judge(Command(ROOT / "conf", list(tokens), "config", False, ())).jobs[0]


def planned(*tokens: str) -> Plan:
    return make_plan(composed("model=llama7b", *tokens))


def part(plan: Plan, phase: str, name: str) -> int:
    (found,) = (p for p in plan.phases if p.name == phase)
    return next((p.bytes for p in found.parts if p.name == name), 0)


def total(plan: Plan, phase: str) -> int:
    return next(p.bytes for p in plan.phases if p.name == phase)


def test_llama_2_7b_cache_by_hand() -> None:
    # 32 layers x keys and values of 4096 x 2 bytes = 524,288 bytes a token; 64 rows of 512 + 64
    assert part(planned(), "rollout", "key-value cache") == 64 * 576 * 524_288
    assert part(planned("generation.batch_size=16"), "rollout", "key-value cache") == 16 * 576 * 524_288


def test_llama_3_8b_cache_has_a_quarter_of_the_heads() -> None:
    plan = make_plan(composed("model=llama3_8b"))
    assert part(plan, "rollout", "key-value cache") == 64 * 576 * 32 * 2 * 1024 * 2


def test_llama_2_7b_activations_by_hand() -> None:
    # a token of a layer in bfloat16: two inputs, queries, keys, values and the output of the attention
    # of 4096 each, gate and up of 11008
    token = 2 * (2 * 4096 + 4 * 4096 + 2 * 11_008)
    assert token == 93_184
    plain = planned("model.gradient_checkpointing=false")
    assert part(plain, "update", "activations kept for the backward pass") == 32 * 8 * 576 * token
    assert part(planned(), "update", "inputs of the layers") == 32 * 8 * 576 * 2 * 2 * 4096


def test_a_family_that_goes_through_its_own_modules_keeps_more() -> None:
    shape = composed("model=llama7b").model.shape.model_copy(update={"family": "gemma"})
    own = composed("model=llama7b", "model.gradient_checkpointing=false")
    other = own.model_copy(update={"model": own.model.model_copy(update={"shape": shape})})
    name = "activations kept for the backward pass"
    # norms in float32, a float32 copy of the input of each adapter, silu(gate) beside gate and up
    token = 8 * 4096 + 8 * 4096 + 6 * 11_008 + 4 * (5 * 4096 + 4096 + 11_008) + 2 * 2 * 4096
    assert part(make_plan(other), "update", name) == 32 * 8 * 576 * token


def test_adapters_on_the_upper_layers_end_the_backward_pass_there() -> None:
    some = "model.lora.target_modules=[layers.30.self_attn.q_proj,layers.31.self_attn.q_proj]"
    name = "activations kept for the backward pass"
    upper = part(planned(some, "model.gradient_checkpointing=false"), "update", name)
    whole = part(planned("model.gradient_checkpointing=false"), "update", name)
    assert upper * 16 == whole


def test_a_critic_with_an_adapter_of_its_own_doubles_what_trains() -> None:
    own, shared = planned(), planned("model.critic=shared")
    head = 4097
    assert own.learning - head == 2 * (shared.learning - head)
    # float32 weights, gradients and two moments of one adapter
    assert total(own, "update") - total(shared, "update") == 16 * 39_976_960
    assert total(own, "scoring") - total(shared, "scoring") == 12 * 39_976_960
    assert planned("advantage=reinforce").learning == shared.learning - head


def test_halves() -> None:
    plan = planned("model.gradient_checkpointing=false")
    half = planned("model.gradient_checkpointing=false", "ppo.micro_batch_size=4")
    name = "activations kept for the backward pass"
    assert part(plan, "update", name) == 2 * part(half, "update", name)
    assert planned("model.lora.r=8").roles[0].parameters * 2 == plan.roles[0].parameters


def test_memory_is_flat_in_the_size_of_the_rollout() -> None:
    bigger = planned("ppo.prompts_per_iteration=256", "ppo.epochs=8")
    assert [phase.bytes for phase in bigger.phases] == [phase.bytes for phase in planned().phases]


def test_eager_attention_writes_its_matrix_out() -> None:
    tokens = ["model=gemma2_2b", "data.max_prompt_length=4032"]
    eager, sdpa = (make_plan(composed(*tokens, f"model.attention={name}")) for name in ("eager", "sdpa"))
    # 8 rows, 8 heads, 4096 x 4096, 2 + 2 + 4 bytes
    matrix = 8 * 8 * 4096 * 4096 * 8
    name = "one layer at work"
    assert part(eager, "update", name) - part(sdpa, "update", name) == matrix


def test_logits_come_in_chunks() -> None:
    """A vocabulary of 256,000: 128 rows at a time on a CPU, 262 on a GPU, bfloat16 and twice float32."""
    tokens = ["model=gemma_2b", "ppo.micro_batch_size=1", "generation.max_new_tokens=512"]
    tokens.append("data.max_prompt_length=1")
    gpu, cpu = (make_plan(composed(*tokens, *more)) for more in ([], ["trainer=cpu"]))
    states = 512 * 2048 * (2 * 4 + 2 * 2)
    assert part(cpu, "scoring", "logits") == 128 * 256_000 * 10 + states
    assert part(gpu, "scoring", "logits") == 262 * 256_000 * 10 + states
    # the update needs no entropy unless it pays for it, but a gradient for each hidden state
    bonus = make_plan(composed(*tokens, "ppo.entropy_coef=0.01"))
    assert part(gpu, "update", "logits") == 262 * 256_000 * 6 + 512 * 2048 * (2 * 4 + 3 * 2)
    assert part(bonus, "update", "logits") == 262 * 256_000 * 10 + 512 * 2048 * (2 * 4 + 4 * 2)


def test_a_dequantised_copy_is_there_until_the_update() -> None:
    copied, plain = planned("model.rollout_weights=dequantized"), planned()
    name = "de-quantised weights of the rollout"
    assert part(copied, "rollout", name) == part(copied, "scoring", name) == 2 * 6_476_005_376
    assert total(copied, "update") == total(plain, "update")
    # and nothing is de-quantised on the spot
    assert part(copied, "scoring", "one layer at work") < part(plain, "scoring", "one layer at work")
    packed = planned("model.rollout_weights=packed", "trainer=cpu")
    assert part(packed, "rollout", "packed weights while sampling") == 2 * (6_476_005_376 + 32_000 * 4096)
    assert total(packed, "scoring") == total(
        planned("model.rollout_weights=dequantized", "trainer=cpu"), "scoring"
    )
    config = composed("model=llama7b", "model.rollout_weights=dequantized")
    assert "model.rollout_weights=nf4" in {one.setting for one in advise(config, copied)[0] if one.saved > 0}


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_stages_on_fixed_examples_have_no_rollout(stage: str) -> None:
    plan = planned(f"stage={stage}")
    assert [phase.name for phase in plan.phases] == ["update"]
    section = {"reward": "reward_model"}.get(stage, stage)
    assert total(planned(f"stage={stage}", f"{section}.max_length=1024"), "update") > total(plan, "update")


def test_low_rank_terms_are_multiplied_stacked() -> None:
    # rank 16: A below one another, 16 inputs a map, and a B as high as its group: q, k, v 3 x 4096; gate, up
    # 2 x 11,008; each of the two others by itself
    layer = 3 * 16 * (4096 + 3 * 4096) + 16 * (4096 + 4096)
    layer += 2 * 16 * (4096 + 2 * 11_008) + 16 * (11_008 + 4096)
    assert part(planned(), "update", "low-rank terms as they are multiplied") == 2 * 32 * layer


def test_cards() -> None:
    words = {verdict.gib: verdict.word for verdict in judge_cards(int(11 * GIB))}
    assert words == {8: "no", 12: "tight", 16: "fits", 24: "fits", 48: "fits", 80: "fits"}
    assert {v.word for v in judge_cards(int(0.85 * 8 * GIB))} == {"fits"}
    assert tuple(v.gib for v in judge_cards(0)) == CARDS


def test_advice_is_the_difference_of_two_plans_the_most_first() -> None:
    plan = planned("model.gradient_checkpointing=false", "generation.batch_size=8")
    config = composed("model=llama7b", "model.gradient_checkpointing=false", "generation.batch_size=8")
    advice, together = advise(config, plan)
    saved = {one.setting: one.saved for one in advice}
    assert next(iter(saved)) == "model.gradient_checkpointing=true"
    less = planned("generation.batch_size=8").peak.bytes
    assert saved["model.gradient_checkpointing=true"] == plan.peak.bytes - less
    assert saved["model.critic=shared"] == 16 * 39_976_960
    assert sorted(saved.values(), reverse=True) == list(saved.values())
    assert together < plan.peak.bytes - max(saved.values())


def test_advice_names_only_what_is_left() -> None:
    tokens = ["model=llama7b", "model.critic=shared", "ppo.micro_batch_size=1", "generation.batch_size=1"]
    config = composed(*tokens, "model.lora.r=1")
    assert advise(config, make_plan(config))[0] == ()
    unquantised = composed(*tokens, "model.quantization=none", "model.lora.r=1")
    before, after = make_plan(unquantised), make_plan(config)
    ((name, saved),) = [(one.setting, one.saved) for one in advise(unquantised, before)[0]]
    assert name == "model.quantization=nf4"
    # 2 bytes a weight against half of one and the scales; but the layer at work is de-quantised on the spot
    four_bit = 3_238_002_688 + 101_187_584 + 1_581_056 + 224 * 1088
    worked = part(after, "update", "one layer at work") - part(before, "update", "one layer at work")
    assert saved == 2 * 6_476_005_376 - four_bit - worked


def test_what_a_person_sees() -> None:
    console = Console(record=True, width=100)
    show_plan(composed("model=llama7b"), console)
    shown = console.export_text()
    for text in ("llama7b, 6.74B parameters", "key-value cache", "what would save most", "card", "80 GiB"):
        assert text in shown
    on_cpu = Console(record=True, width=100)
    show_plan(composed("model=llama7b", "trainer=cpu"), on_cpu)
    assert "main memory" in on_cpu.export_text()


def process(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in its own process, which then names the heavy libraries that it has loaded."""
    code = (
        "import sys; from pathlib import Path; from rlhf_lightning.config.cli import main\n"
        f"code = main(Path({str(ROOT)!r}), sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'lightning', 'peft', 'bitsandbytes', 'numpy'} & set(sys.modules)\n"
        "print('loaded', sorted(heavy))\nraise SystemExit(code)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_command_loads_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    done = process("model=llama7b", "plan=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded []"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stage=pipeline"], "plan=true counts the memory of training, not of stage=pipeline"),
        (["doctor=true"], "plan=true loads nothing, doctor=true everything: take one of them"),
        (["-m", "ppo.clip=0.1,0.2"], "plan=true looks at one run: leave out -m"),
        (["model.path=a/b", "reward=length"], "a/b is no folder here, so give model.shape"),
    ],
)
def test_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = process("plan=true", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert sentence in done.stderr
