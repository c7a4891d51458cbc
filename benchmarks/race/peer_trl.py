"""The peer's side: TRL 1.10.0's PPO trainer, the last that it ships. Runs in the peer's own environment.

    PEER/bin/python -m benchmarks.race.peer_trl MODEL --dtype bf16

An iteration is ``--batch`` chat prompts, ``--length`` new tokens to each whatever is drawn, four epochs of
two minibatches; the policy carries LoRA r=16 on every linear layer, and without it is the reference. Value
and reward models are models of their own, which TRL wants. In bfloat16 the value model trains whole, as TRL's
example does; ``--value lora`` gives it an adapter, as the 4-bit run must. The last line printed is JSON.
"""

import argparse
import json
import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.race.peak import peak_rss_gb
from benchmarks.race.stamps import Stamps
from benchmarks.race.subjects import questions

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Iterations(TrainerCallback):
    """A mark at the end of each iteration."""

    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps

    def on_step_end(self, *_: object, **__: object) -> None:
        self.stamps.mark()


def lora(task: str) -> LoraConfig:
    return LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules=MODULES)


def models(options: argparse.Namespace) -> tuple:
    """Policy, value and reward model."""
    quantized = options.dtype == "4bit"
    how = {"dtype": torch.bfloat16}
    if quantized:
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    policy = AutoModelForCausalLM.from_pretrained(options.model, **how)
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, **how)
        for _ in range(2)
    )
    if quantized or options.value == "lora":
        value = get_peft_model(value, lora("SEQ_CLS"))
        value.base_model_prefix = "model"  # the name under which TRL looks for the trunk
    return policy, value, reward


def trainer(options: argparse.Namespace, stamps: Stamps) -> PPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = tokenizer.unk_token
    rows = []
    for text in questions(options.batch) * options.iterations:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        rows.append({"input_ids": ids})
    data = Dataset.from_list(rows)
    policy, value, reward = models(options)
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        total_episodes=len(rows),
        per_device_train_batch_size=options.batch // 2,
        gradient_accumulation_steps=2,
        num_mini_batches=2,
        num_ppo_epochs=4,
        local_rollout_forward_batch_size=options.batch,
        response_length=options.length,
        temperature=0.7,
        learning_rate=1e-5,
        bf16=options.dtype == "bf16",  # in 4 bits its cast of the norms stops the run on a CPU
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        num_sample_generations=0,
        logging_steps=1,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        value_model=value,
        reward_model=reward,
        train_dataset=data,
        eval_dataset=data,
        peft_config=lora("CAUSAL_LM"),
        callbacks=[Iterations(stamps)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="One side of the race: TRL's PPO.")
    parser.add_argument("model", help="folder of a chat model")
    parser.add_argument("--dtype", choices=["bf16", "4bit"], default="bf16")
    parser.add_argument("--value", choices=["full", "lora"], default="full")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    stamps = Stamps()
    run = trainer(options, stamps)
    stamps.mark()
    run.train()
    result = {"seconds": stamps.seconds, "cpu_seconds": stamps.cpu_seconds, "peak_gb": peak_rss_gb()}
    if torch.cuda.is_available():
        result["peak_gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps(result))


if __name__ == "__main__":
    main()
