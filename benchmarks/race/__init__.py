"""The same PPO iteration by TRL and by this project, side by side."""
