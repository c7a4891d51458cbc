"""A Python function as the reward: ``reward.function=package.module:name``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlhf_lightning.config.rewards import FunctionRewardConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import WrongCount, checked, shown_error, shown_row
from rlhf_lightning.rewards.importing import import_function
from rlhf_lightning.rewards.worker import CallFailed, CallTimeout, Worker
from rlhf_lightning.types import Scores


class FunctionReward:
    """Calls ``function(prompts=[...], responses=[...])``; one finite number a response has to come back.

    Whatever goes wrong stops the run. A batch that raised, hung or came back with the wrong count is tried
    once more row by row, only to name the row in the message; that search takes at most ``timeout_s``
    again. So the function should not count its calls.
    """

    def __init__(self, config: FunctionRewardConfig, *, name: str = "reward") -> None:
        self.function = import_function(config.function, key=f"{name}.function")
        self.timeout_s = config.timeout_s
        self.key = name
        self.name = f"{name}.function={config.function}"
        self._worker = Worker(self.name)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        try:
            values = self._worker.call(self._batch(prompts, responses), self.timeout_s)
            scores = checked(values, name=self.name, prompts=prompts, responses=responses)
        except CallTimeout:
            raise UserError(
                f"{self.name} had not returned after {self.timeout_s:g} s ({self.key}.timeout_s) "
                f"for {len(responses)} responses; {self._find(prompts, responses, CallTimeout)}"
            ) from None
        except WrongCount as error:
            raise UserError(f"{error}; {self._find(prompts, responses, WrongCount)}") from None
        except CallFailed as failed:
            raised = failed.error
            if isinstance(raised, UserError):
                raise raised from None
            raise UserError(
                f"{self.name} raised {shown_error(raised)}; {self._find(prompts, responses, type(raised))}"
            ) from raised
        return Scores(scores, {})

    def _batch(self, prompts: Sequence[str], responses: Sequence[str]) -> Callable[[], object]:
        # Copies: what the function does to its lists must not reach the rollout.
        return lambda: self.function(prompts=list(prompts), responses=list(responses))

    def _find(self, prompts: Sequence[str], responses: Sequence[str], kind: type[BaseException]) -> str:
        """Words about the first row that alone gives the same fault."""
        deadline = time.monotonic() + self.timeout_s
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            start = time.monotonic()
            try:
                left = max(0.0, deadline - start)
                values = self._worker.call(self._batch([prompt], [response]), left)
                checked(values, name=self.name, prompts=[prompt], responses=[response])
            except CallTimeout:
                if kind is CallTimeout and time.monotonic() - start >= self.timeout_s / 2:
                    return f"alone, this one did not return either: {shown_row(row, prompts, responses)}"
                return f"row by row, {row} of {len(responses)} were done after {self.timeout_s:g} s more"
            except (CallFailed, UserError) as found:
                if isinstance(found.error if isinstance(found, CallFailed) else found, kind):
                    return f"alone, this one does the same: {shown_row(row, prompts, responses)}"
        first = f", {shown_row(0, prompts, responses)} the first" if responses else ""
        return f"no row alone does the same ({len(responses)} tried{first})"
