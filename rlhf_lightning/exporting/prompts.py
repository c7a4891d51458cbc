"""A few prompts on which a merged model is compared with base and adapter."""

from __future__ import annotations

import json

from rlhf_lightning.config.subject import Subject

COUNT = 4
_GENERAL = (
    "The best thing about the place was",
    "Question: What is the capital of France?\nAnswer:",
    "Once upon a time",
    "Write one sentence about the sea.",
)


def prompts_of(subject: Subject) -> list[str]:
    """Prompts that the run itself was shown, or general ones."""
    path = subject.run / "samples.jsonl" if subject.run is not None else None
    if path is None or not path.is_file():
        return list(_GENERAL)
    found: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            prompt = json.loads(line).get("prompt")
        except (ValueError, AttributeError):
            continue  # the last line may be torn
        if isinstance(prompt, str) and prompt.strip() and prompt not in found:
            found.append(prompt)
        if len(found) == COUNT:
            break
    return found or list(_GENERAL)
