"""Train a language model by PPO: `python train.py --help` says how."""

from pathlib import Path

from rlhf_lightning.config.cli import main

if __name__ == "__main__":
    raise SystemExit(main(Path(__file__).resolve().parent))
