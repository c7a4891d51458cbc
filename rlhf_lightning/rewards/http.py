"""A server as the reward: ``reward=http reward.url=http://HOST:PORT/score``; docs/remote_rewards.md."""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
import torch

from rlhf_lightning.config.rewards import HTTPRewardConfig
from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import checked, shown
from rlhf_lightning.types import Scores

log = logging.getLogger(__name__)

TOKEN = "RLHF_REWARD_TOKEN"  # environment variable; the run folder keeps every setting in plain text
LONGEST_S = 60.0  # no pause between two tries grows beyond this by doubling
PATIENCE_S = 600.0  # the longest Retry-After that is waited for
QUIET_S = 2.0  # a wait that will be longer is told
LARGEST = 64 * 2**20  # bytes of an answer
SAID = 200  # characters of the server's words that a message repeats
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class _MayPass(Exception):
    """A failure that another try may not meet, and the seconds that the server asked for."""

    def __init__(self, what: str, retry_after: float | None = None) -> None:
        super().__init__(what)
        self.retry_after = retry_after


class HTTPReward:
    """Posts batches of ``{"prompts": [...], "responses": [...]}`` and reads ``{"scores": [...]}``.

    A lost connection, a time-out, 429 and 5xx are tried again, after ``backoff_s`` that doubles each time;
    ``Retry-After`` lengthens the pause. Any other status and an answer that cannot be read stop the run: they
    would come again. No jitter: one run is one client.

    One pair is scored when this is built, so that a wrong address is found before the first rollout.

    Proxies are those of the environment (``HTTPS_PROXY``, ``NO_PROXY``), but never for this machine itself.

    Raises:
        UserError: there is no server that scores behind ``url``.
    """

    def __init__(self, config: HTTPRewardConfig, *, name: str = "reward") -> None:
        if config.url_fault is not None:
            raise UserError(f"{name}.url {config.url_fault}")
        self.config = config
        self.key = name
        self.name = f"{name}.url={config.url}"
        token = os.environ.get(TOKEN, "").strip()
        if not all("!" <= character <= "~" for character in token):
            raise UserError(f"{TOKEN} must be printable ASCII without blanks, as HTTP headers are; it is not")
        self._has_token = bool(token)
        headers = {"content-type": "application/json", "accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        try:
            self._client = httpx.Client(
                headers=headers,
                timeout=config.timeout_s,
                mounts=dict.fromkeys(LOOPBACK),
                # Rollouts lie further apart than servers keep a silent connection open.
                limits=httpx.Limits(keepalive_expiry=2.0),
            )
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            raise UserError(
                f"{self.name}: a proxy or certificate file named in the environment cannot be used: "
                f"{shown(str(error))}"
            ) from error
        self(["The soup was warm"], [" and the bread was fresh."])

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        size = self.config.batch_size
        scores = [torch.zeros(0)]
        for start in range(0, len(responses), size):
            batch = slice(start, start + size)
            scores.append(self._batch(prompts[batch], responses[batch]))
        return Scores(torch.cat(scores), {})

    def _batch(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        # ASCII: half a surrogate pair, which JSON lines can hold, has an escape but no UTF-8.
        body = json.dumps({"prompts": list(prompts), "responses": list(responses)}).encode("ascii")
        values = self._read(self._insist(body))
        return checked(values, name=self.name, prompts=prompts, responses=responses)

    def _insist(self, body: bytes) -> bytes:
        """The answer to a request, asked for until it comes or ``retries`` are used up."""
        tries = self.config.retries + 1
        start = time.monotonic()
        for number in range(1, tries + 1):
            try:
                return self._post(body)
            except _MayPass as failure:
                if number == tries:
                    count = "1 try" if tries == 1 else f"{tries} tries ({self.key}.retries={tries - 1})"
                    raise UserError(f"{self.name}: {failure}; given up after {count}") from None
                pause = self._pause(failure, number)
                if time.monotonic() - start + pause > QUIET_S:
                    log.warning(
                        "%s: %s; try %d of %d in %.3g s", self.name, failure, number + 1, tries, pause
                    )
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _pause(self, failure: _MayPass, number: int) -> float:
        """Seconds before the try after try ``number``, the first being 1."""
        pause = min(self.config.backoff_s * 2.0 ** min(number - 1, 64), LONGEST_S)
        asked = failure.retry_after or 0.0
        if asked > PATIENCE_S:
            raise UserError(
                f"{self.name}: {failure}, and asks to wait {asked:.0f} s (Retry-After), more than the "
                f"{PATIENCE_S:.0f} s that a run waits: continue later with resume"
            )
        return max(pause, asked)

    def _post(self, body: bytes) -> bytes:
        """One request; the body of its answer where the status is 200."""
        # The client's own limit is for each piece; an answer that trickles in has to end as well.
        deadline = time.monotonic() + self.config.timeout_s
        data = bytearray()
        try:
            with self._client.stream("POST", self.config.url, content=body) as response:
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) > LARGEST:
                        raise UserError(f"{self.name}: the answer is larger than {LARGEST >> 20} MiB")
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("")
        except httpx.TimeoutException:
            limit = f"{self.config.timeout_s:g} s ({self.key}.timeout_s)"
            raise _MayPass(f"no answer within {limit}") from None
        except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as error:
            what = f"no connection ({shown(str(error) or type(error).__name__, SAID)[1:-1]})"
            if _distrusted(error):
                raise UserError(f"{self.name}: {what}") from error
            raise _MayPass(f"{what}; is the server up?") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # not HTTP, or not decodable
            raise UserError(f"{self.name}: {type(error).__name__}: {shown(str(error), SAID)}") from error
        if response.status_code == 200:
            return bytes(data)
        raise self._refusal(response, bytes(data))

    def _refusal(self, response: httpx.Response, data: bytes) -> Exception:
        """What another status than 200 means."""
        code = response.status_code
        what = f"the server answered {code} {httpx.codes.get_reason_phrase(code)}".rstrip()
        if said := _words(data):
            what += f" and said {shown(said, SAID)}"
        if code == 429 or code >= 500:
            return _MayPass(what, _seconds(response.headers.get("retry-after")))
        return UserError(f"{self.name}: {what}{self._hint(code, response)}")

    def _hint(self, code: int, response: httpx.Response) -> str:
        if 300 <= code < 400:
            there = shown(response.headers.get("location", ""), SAID)
            return f", which points to {there}: name that address itself in {self.key}.url"
        if code in (401, 403):
            return f"; the token is taken from {TOKEN}, which is {'set' if self._has_token else 'not set'}"
        if code in (404, 405):
            return f"; {self.key}.url has to name the path that takes POST, often /score"
        if code == 413:
            return f"; a smaller {self.key}.batch_size (now {self.config.batch_size}) makes smaller requests"
        return ""

    def _read(self, data: bytes) -> object:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            said = shown(data.decode("utf-8", "replace"), SAID)
            raise UserError(f"{self.name}: the answer must be JSON, and the server said {said}") from None
        if not isinstance(answer, dict) or "scores" not in answer:
            said = shown(data.decode("utf-8", "replace"), SAID)
            raise UserError(
                f'{self.name}: the answer must be {{"scores": [...]}}, and the server said {said}'
            )
        return answer["scores"]


def _words(data: bytes) -> str:
    """What a refusal says: its ``detail`` where it is JSON with one, else its text."""
    text = data.decode("utf-8", "replace").strip()
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text
    detail = answer.get("detail") if isinstance(answer, dict) else None
    return detail if isinstance(detail, str) else text


def _seconds(retry_after: str | None) -> float | None:
    """``Retry-After`` in seconds, a number or a date (RFC 9110, 10.2.3); None where it is neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            date = parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _distrusted(error: BaseException) -> bool:
    """Whether a certificate was refused: it will be the next time."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
