"""The reward role of the policy's backbone: a real adapter and head (faults 30 to 33)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf_lightning.config.rewards import LearnedRewardConfig
from rlhf_lightning.data.encoding import encode_judged
from rlhf_lightning.models.actor_critic import ActorCritic
from rlhf_lightning.rewards.build import build_reward

PROMPTS = [
    "the so",
    "a slow waiter brought a co",
    "we",
    "nothing on the menu",
    "the",
    "a",
    "would we",
    "rice",
]
RESPONSES = [
    "up was warm",
    "ld plate",
    " would come back for the noodles any day",
    "",
    " soup",
    " b",
    "?",
    " and bread",
]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def reward_folder(
    request: pytest.FixtureRequest, model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A LoRA adapter with weights of some size, and its score head, as ``stage=reward`` leaves them."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(model_folders[request.param])
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    folder = tmp_path_factory.mktemp(f"reward-{request.param}")
    peft.save_pretrained(folder)
    save_file({"weight": torch.randn(1, 64), "bias": torch.tensor([0.5])}, folder / "score_head.safetensors")
    return request.param, folder


@pytest.fixture
def actor_critic(reward_folder: tuple[str, Path], build: Callable[..., ActorCritic]) -> ActorCritic:
    return build(reward_folder[0], reward_path=str(reward_folder[1]))


def scores(actor_critic: ActorCritic, *, batch_size: int = 32, context: int | None = None) -> torch.Tensor:
    config = LearnedRewardConfig(kind="learned", batch_size=batch_size)
    tokenizer = actor_critic.backbone.tokenizer
    reward = build_reward(config, score=actor_critic.score, tokenizer=tokenizer, context=context)
    return reward(PROMPTS, RESPONSES).scores


def test_faults_30_31_32_each_score_is_that_of_the_whole_text_alone(
    actor_critic: ActorCritic, reward_folder: tuple[str, Path], model_folders: dict[str, Path]
) -> None:
    """Against PEFT's own reading of the saved adapter, one text at a time, no padding."""
    from peft import PeftModel
    from safetensors.torch import load_file

    family, folder = reward_folder
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folders[family]), folder
    ).eval()
    head = load_file(folder / "score_head.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(model_folders[family])
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([[*tokenizer(prompt + response).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            hidden = plain(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        expected.append((hidden @ head["weight"][0] + head["bias"]).item())
    for batch_size in (1, 3, 8):
        found = scores(actor_critic, batch_size=batch_size)
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected}) == len(expected)


def test_left_or_right_padding_is_the_same_to_the_reader(actor_critic: ActorCritic) -> None:
    ids = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])  # row 1 really ends with the pad id
    left = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 0]])
    left_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    right = actor_critic.score(ids, mask)
    assert torch.allclose(right, actor_critic.score(left, left_mask), atol=1e-4)
    assert torch.allclose(right[0], actor_critic.score(ids[:1, :3], mask[:1, :3])[0], atol=1e-4)


def test_a_text_longer_than_the_context_keeps_its_end(actor_critic: ActorCritic) -> None:
    kept = scores(actor_critic, context=3)
    row = encode_judged(actor_critic.backbone.tokenizer, PROMPTS[2], RESPONSES[2])[-3:]
    alone = actor_critic.score(torch.tensor([row]), torch.ones(1, 3, dtype=torch.long))
    assert kept[2].item() == pytest.approx(alone.item(), abs=1e-4)


@pytest.fixture
def tokenizer(model_folders: dict[str, Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_folders["llama"])


def test_fault_30_prompt_and_response_are_one_string(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, response = "the so", "up was warm"
    together = tokenizer(prompt + response).input_ids
    assert together != tokenizer(prompt).input_ids + tokenizer(response).input_ids  # the seam is real
    assert encode_judged(tokenizer, prompt, response) == [*together, tokenizer.eos_token_id]


def test_one_end_token_behind_whether_the_tokenizer_adds_it_or_not(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    end = tokenizer.eos_token_id
    assert encode_judged(tokenizer, "", "") == [end]
    plain = encode_judged(tokenizer, "the", " soup")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", end)]
    )
    assert encode_judged(tokenizer, "the", " soup") == plain and plain.count(end) == 1


def test_fault_33_one_bos_in_front_also_where_the_text_brings_it(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.bos_token = "<turn>"
    bos = tokenizer.bos_token_id
    assert encode_judged(tokenizer, "<turn>the", " soup").count(bos) == 1  # the tokenizer adds none itself
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<turn> $A", special_tokens=[("<turn>", bos)]
    )
    written = encode_judged(tokenizer, "<turn>the", " soup")
    assert written == encode_judged(tokenizer, "the", " soup")
    assert written[0] == bos and written.count(bos) == 1


def test_no_answers_no_scores(actor_critic: ActorCritic) -> None:
    config = LearnedRewardConfig(kind="learned")
    reward = build_reward(config, score=actor_critic.score, tokenizer=actor_critic.backbone.tokenizer)
    assert reward([], []).scores.shape == (0,)
