"""The settings of small runs."""

COMMON = [
    "model.quantization=none", "model.dtype=float32", "model.lora.r=4", "trainer=cpu", "trainer.threads=1",
    "logger=none", "callbacks.checkpoint_every=2", "callbacks.progress=false",
]  # fmt: skip
PPO = [
    *COMMON, "ppo.iterations=4", "ppo.prompts_per_iteration=8", "ppo.minibatch_size=4",
    "ppo.micro_batch_size=2", "ppo.normalize_scores=true", "ppo.kl_target=0.5", "ppo.lr_schedule=cosine",
    "generation.max_new_tokens=6",
    "evaluate.every=2", "evaluate.prompts=4", "callbacks.show=2",
]  # fmt: skip
STAGES = {
    "sft": ["stage=sft", "sft.max_steps=12", "sft.log_every=3", "sft.batch_size=8", "sft.micro_batch_size=8"],
    "reward": [
        "stage=reward",
        "reward_model.max_steps=12",
        "reward_model.log_every=3",
        "reward_model.batch_size=8",
        "reward_model.micro_batch_size=8",
    ],
    "dpo": ["stage=dpo", "dpo.max_steps=12", "dpo.log_every=3", "dpo.batch_size=8", "dpo.micro_batch_size=8"],
}  # fmt: skip
