"""A reward model behind HTTP: ``python -m rlhf_lightning.serve_reward RUN``; docs/remote_rewards.md."""
