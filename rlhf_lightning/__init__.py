"""RLHF with PPO for people who know PyTorch Lightning and Hydra."""

__version__ = "0.1.0"
