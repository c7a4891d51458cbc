"""From rewards to advantages, one estimator a file: on tokens ``gae`` and ``reinforce_plus_plus``, the others
on whole responses.
"""

from rlhf_lightning.advantages.gae import gae
from rlhf_lightning.advantages.groups import per_token
from rlhf_lightning.advantages.grpo import grpo
from rlhf_lightning.advantages.reinforce import RunningBaseline, reinforce
from rlhf_lightning.advantages.reinforce_plus_plus import reinforce_plus_plus
from rlhf_lightning.advantages.rloo import rloo

__all__ = ["RunningBaseline", "gae", "grpo", "per_token", "reinforce", "reinforce_plus_plus", "rloo"]
