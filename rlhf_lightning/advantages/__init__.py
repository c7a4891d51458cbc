"""From rewards to advantages, one estimator a file: ``gae`` on tokens, the others on whole responses."""

from rlhf_lightning.advantages.gae import gae
from rlhf_lightning.advantages.groups import per_token
from rlhf_lightning.advantages.grpo import grpo
from rlhf_lightning.advantages.reinforce import reinforce
from rlhf_lightning.advantages.rloo import rloo

__all__ = ["gae", "grpo", "per_token", "reinforce", "rloo"]
