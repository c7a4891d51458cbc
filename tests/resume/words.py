"""The settings of small runs."""

COMMON = [
    "model.quantization=none", "model.dtype=float32", "model.lora.r=4", "logger=none", "trainer=cpu", "trainer.threads=1",
    "callbacks.checkpoint_every=2", "callbacks.progress=false",
]  # fmt: skip
SMALL = [
    "ppo.iterations=4", "ppo.prompts_per_iteration=8", "ppo.minibatch_size=4", "ppo.micro_batch_size=2",
    "ppo.normalize_scores=true", "ppo.kl_target=0.5", "ppo.lr_schedule=cosine", "generation.max_new_tokens=6",
    "evaluate.every=2", "evaluate.prompts=4", "callbacks.show=2",
]  # fmt: skip
