"""PPO against the best that any method can do, on a task small enough to write down every response."""
