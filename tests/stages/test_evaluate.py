"""Policy, reference and rival before the same prompts, on small real models."""

import pytest
import torch

from rlhf_lightning.config.schema import Config, ModelConfig
from rlhf_lightning.data.prompts import PromptSet
from rlhf_lightning.functional.text_metrics import distinct_n
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.models.backbone import load_backbone
from rlhf_lightning.models.cast import evaluate_cast
from rlhf_lightning.stages.evaluate import Evaluator, held_out_prompts
from rlhf_lightning.types import Scores

TEXTS = ("the soup", "a slow waiter brought a cold", "we", "nothing on the menu", "the bread")


def letters(prompts, responses) -> Scores:
    """How many letters e, with how many o as the part that only watches."""
    count = [torch.tensor([float(text.count(c)) for text in responses]) for c in "eo"]
    return Scores(count[0], {"gold": count[1]})


def settings(model_folders, **sections) -> Config:
    return Config.model_validate(
        {
            "stage": {"name": "evaluate"},
            "model": {"quantization": "none", "dtype": "float32", "path": str(model_folders["llama"])},
            "reward": {"kind": "length", "target": 3},
            "generation": {"max_new_tokens": 8, "batch_size": 3, "temperature": 0.7},
            "ppo": {"micro_batch_size": 2},
            "evaluate": {"bootstrap": 200, "prompts": 4, "samples": 2} | sections.pop("evaluate", {}),
        }
        | sections
    )


@pytest.fixture
def prompt_set():
    def make(actor_critic, texts=TEXTS) -> PromptSet:
        ids = [actor_critic.backbone.tokenizer(text).input_ids for text in texts]
        return PromptSet(
            ids, list(texts), "here", read=len(ids), truncated=0, dropped=0, templated=0,
            already_templated=0, own_system=0,
        )  # fmt: skip

    return make


@pytest.fixture
def evaluate(build, model_folders, prompt_set):
    def make(change=lambda actor_critic: actor_critic, reward=letters, texts=TEXTS, **sections) -> Evaluator:
        actor_critic = change(build(temperature=0.7))
        return Evaluator(
            actor_critic, reward, prompt_set(actor_critic, texts), settings(model_folders, **sections)
        )

    return make


def test_an_untrained_policy_is_its_reference(evaluate):
    found = evaluate()()
    assert found.metrics["eval/kl"] == 0.0
    assert found.metrics["eval/win_rate"] == found.metrics["eval/gold_win_rate"] == 0.5
    assert found.report["win_rates"]["policy over reference"]["score"]["ties"] == 1.0
    assert all(row["policy"] == row["reference"] for row in found.rows)  # the same random numbers
    assert [row["sample"] for row in found.rows] == [0, 1] * 4
    first, second = (row["policy"]["response"] for row in found.rows[:2])
    assert first != second


def test_figures_are_those_of_the_answers(evaluate, disturb):
    evaluator = evaluate(disturb)
    found = evaluator()
    rows, metrics = found.rows, found.metrics
    ours, theirs = ([row[role]["score"] for row in rows] for role in ("policy", "reference"))
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True))
    assert ours != theirs
    assert metrics["eval/score"] == pytest.approx(sum(ours) / 8)
    assert metrics["eval/score_reference"] == pytest.approx(sum(theirs) / 8)
    assert metrics["eval/win_rate"] == pytest.approx(won / 8)
    assert metrics["eval/win_rate_low"] <= metrics["eval/win_rate"] <= metrics["eval/win_rate_high"]
    assert metrics["eval/gold_score"] == pytest.approx(
        sum(row["policy"]["response"].count("o") for row in rows) / 8
    )
    assert metrics["eval/length_mean"] == pytest.approx(sum(row["policy"]["length"] for row in rows) / 8)
    ended = sum(row["policy"]["ended"] != "length" for row in rows)
    assert metrics["eval/eos_rate"] == pytest.approx(ended / 8)
    words = [row["policy"]["response"].split() for row in rows]
    assert metrics["eval/distinct_1"] == distinct_n(words, 1)
    assert all(
        row["policy"]["score"] == row["policy"]["response"].count("e") and "gold" in row["policy"]["parts"]
        for row in rows
    )


def test_kl_is_the_log_ratio_of_the_policys_own_answers(evaluate, disturb):
    evaluator = evaluate(disturb)
    found = evaluator()
    model, generation = evaluator.actor_critic, evaluator._answer("policy", None).generation
    with torch.no_grad():
        logits = {}
        ids = torch.cat([generation.prompt_ids, generation.response_ids], dim=1)
        mask = torch.cat([generation.prompt_mask, generation.response_mask], dim=1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        for role in ("policy", "reference"):
            with model.roles.use(role):
                out = model.backbone.model(input_ids=ids, attention_mask=mask.long(), position_ids=positions)
            logits[role] = (out.logits[:, generation.prompt_ids.shape[1] - 1 : -1] / 0.7).log_softmax(-1)
    gap = logits["policy"] - logits["reference"]
    kl = (
        gap.gather(2, generation.response_ids.unsqueeze(2))
        .squeeze(2)
        .masked_fill(~generation.response_mask, 0)
    )
    assert [row["kl"] for row in found.rows] == pytest.approx(kl.sum(1).tolist(), abs=1e-4)
    assert found.metrics["eval/kl"] == pytest.approx(float(kl.sum(1).mean()), abs=1e-4)
    assert abs(found.metrics["eval/kl"]) > 0.01


def test_the_reference_is_asked_once_and_the_outcome_is_counted(evaluate, disturb):
    asked: list[int] = []

    def counting(prompts, responses):
        asked.append(len(responses))
        return letters(prompts, responses)

    evaluator = evaluate(disturb, counting)
    first = evaluator()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = evaluator()
    assert torch.equal(state, torch.get_rng_state())
    assert asked == [8, 8, 8]
    assert (first.metrics, first.rows) == (second.metrics, second.rows)
    other = evaluate(disturb, seed=1)()
    assert other.rows != first.rows


def test_a_rival_is_an_adapter_of_the_same_backbone(build, disturb, model_folders, prompt_set, tmp_path):
    disturb(build()).save(tmp_path / "a")
    disturb(build(), 0.3).save(tmp_path / "b")
    outcomes = {}
    for name in "ab":
        config = settings(model_folders)
        cast = evaluate_cast(
            config.model, run=str(tmp_path / "a" / "policy"), against=str(tmp_path / name / "policy")
        )
        torch.manual_seed(0)
        model = ActorCritic(load_backbone(config.model), config.model, cast=cast, temperature=0.7)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        outcomes[name] = Evaluator(model, letters, prompt_set(model), config)()
    same, other = outcomes["a"], outcomes["b"]
    assert same.metrics["eval/win_rate_rival"] == 0.5
    assert [row["rival"] for row in same.rows] == [row["policy"] for row in same.rows]
    assert [row["policy"] for row in same.rows] == [row["policy"] for row in other.rows]
    assert [row["rival"] for row in other.rows] != [row["policy"] for row in other.rows]
    assert {"eval/score_rival", "eval/win_rate_rival_low", "eval/gold_win_rate_rival_high"} <= set(
        other.metrics
    )


def test_the_same_prompts_are_taken_whatever_their_order_and_number(evaluate):
    asked = {evaluate(texts=order).prompts.texts for order in (TEXTS, (*TEXTS, *TEXTS[:3]))}
    assert len(asked) == 1
    assert set(evaluate(texts=TEXTS[::-1]).prompts.texts) == set(*asked)
    assert len(set(*asked)) == 4


@pytest.mark.parametrize(
    ("trained", "now", "part", "warned"),
    [
        ({}, {}, "all", True),  # PPO that never evaluated learned from every prompt
        ({"held_out_share": 0.4}, {}, "held_out", False),
        ({"held_out_share": 0.2}, {"held_out_share": 0.6}, "held_out", True),
        ({"held_out": "tiny"}, {"held_out_share": 0.4}, "held_out", True),
        ({"path": "another.jsonl"}, {}, "all", False),
    ],
)
def test_where_held_out_prompts_come_from(trained, now, part, warned, build, model_folders, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"the soup number {number}\n" for number in range(40)))
    config = settings(model_folders, data={"path": str(file)} | now)
    before = settings(model_folders, stage={"name": "ppo"}, data={"path": str(file)} | trained)
    tokenizer = build().backbone.tokenizer
    prompts, warning = held_out_prompts(config, tokenizer, context=128, trained=before)
    assert (len(prompts) == 40) is (part == "all")
    assert (warning is not None) is warned
    if warned:
        assert "the model learned from" in warning


def test_named_held_out_rows_win(build, model_folders, tmp_path):
    file = tmp_path / "held_out.txt"
    file.write_text("the bread\n")
    config = settings(model_folders, data={"path": "not/there.txt", "held_out": str(file)})
    prompts, warning = held_out_prompts(config, build().backbone.tokenizer, context=128)
    assert (prompts.texts, warning) == (["the bread"], None)


def test_the_reference_of_a_run_is_what_it_started_from():
    model = ModelConfig(adapter="sft_run")
    assert evaluate_cast(model, run="ppo_run")["reference"].start == "sft_run"
    assert evaluate_cast(ModelConfig(), run="ppo_run")["reference"].adapter is None
