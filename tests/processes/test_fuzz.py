"""Random commands from the config's own keys with wild values: each runs, or is refused with a sentence."""

from __future__ import annotations

import os
import random
import signal
from typing import Any, Literal, get_args, get_origin

from rlhf_lightning.config.describe import ANY, Setting, settings
from tests.processes.words import COMMON

COUNT = int(os.environ.get("FUZZ", "30"))
WILD = [
    "-1", "0", "1", "2", "3", "7", "64", "0.5", "1.5", "-0.0", "1e-30", "1e30", "nan", "inf", "-inf",
    "9" * 30, "null", "true", "false", "''", "x", "é", "'a b'", "007", "0x10", "1_000", "[]",
    "[1,2]", "{}", "{a: 1}", "~/nowhere", "../..", "/dev/null", "'${ppo.clip}'", "'${nothing}'", "<script>",
    "'%s'", "'a=b'",
]  # fmt: skip
SMALL = [
    *COMMON, "debug=default", "ppo.iterations=1", "ppo.prompts_per_iteration=4", "ppo.minibatch_size=4",
    "ppo.micro_batch_size=2", "ppo.epochs=1", "generation.max_new_tokens=4", "callbacks.show=1",
    "sft.max_steps=2", "reward_model.max_steps=2", "dpo.max_steps=2",
]  # fmt: skip
STARTS = [[], [], [], ["stage=sft"], ["stage=reward"], ["stage=dpo"], ["advantage=grpo"], ["reward=length"]]
SECONDS = 20  # a run that is still going then, runs


def choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in choices(part)]


def wild(draw: random.Random, setting: Setting) -> str:
    own = choices(setting.field.annotation)
    value = draw.choice(own) if own and draw.random() < 0.5 else draw.choice(WILD)
    return f"{setting.key.replace(ANY, 'gold')}={value}"


def commands(count: int, seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    keys = [setting for setting in settings() if setting.key not in ("resume", "run")]
    return [
        [*draw.choice(STARTS), *(wild(draw, one) for one in draw.sample(keys, draw.choice((1, 1, 2, 3))))]
        for _ in range(count)
    ]


def test_no_command_ends_in_a_traceback(runs, tmp_path):
    """FUZZ=2000 SEED=1 for more, and others."""
    wrong, ran, refused = [], 0, 0
    for number, words in enumerate(commands(COUNT, int(os.environ.get("SEED", "0")))):
        log = tmp_path / f"{number}.txt"
        command = [*SMALL, *words, f"hydra.run.dir={tmp_path / str(number)}"]
        code = runs(*command, log=log, seconds=SECONDS)
        said = log.read_text(errors="replace")
        if code not in (0, 1, -signal.SIGALRM) or "Traceback" in said or (code == 1 and not said.strip()):
            wrong.append(f"{code}  {' '.join(words)}\n{said[-600:]}")
        ran, refused = ran + (code != 1), refused + (code == 1)
    print(f"{COUNT} commands: {ran} ran, {refused} were refused")
    assert not wrong, f"{len(wrong)} of {COUNT}:\n" + "\n\n".join(wrong)
