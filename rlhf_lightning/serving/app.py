"""The web application: ``POST /score``, ``GET /health``."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rlhf_lightning.errors import UserError
from rlhf_lightning.rewards.base import Reward, shown_value

MOST_ROWS = 1024
LARGEST = 64 * 2**20  # bytes of a request


class Refused(Exception):
    """A request that gets a sentence instead of scores."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


def make_app(reward: Reward, *, model: str, token: str | None = None) -> FastAPI:
    """The application around a reward.

    One thread scores, one request at a time; the event loop stays free, and ``/health`` answers meanwhile.

    Args:
        model: a name for ``/health``.
        token: what ``Authorization: Bearer`` has to carry for ``/score``; None: nothing is asked.
    """
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="Reward", lifespan=life)

    @app.exception_handler(Refused)
    async def refuse(_: Request, refused: Refused) -> JSONResponse:
        return JSONResponse({"detail": refused.detail}, refused.status, refused.headers)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": model}

    @app.post("/score")
    async def score(request: Request) -> dict[str, list[float]]:
        _let_in(request, token)
        prompts, responses = _rows(await _body(request))
        loop = asyncio.get_running_loop()
        try:
            scored = await loop.run_in_executor(worker, reward, prompts, responses)
        except UserError as error:
            raise Refused(500, str(error)) from error
        return {"scores": scored.scores.tolist()}

    return app


def _let_in(request: Request, token: str | None) -> None:
    if token is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Bytes, and compared in constant time: how long it takes must not tell how much was right.
    right = secrets.compare_digest(given.strip().encode("utf-8"), token.encode("utf-8"))
    if kind.lower() != "bearer" or not right:
        detail = "the token is missing" if not given else "the token is wrong"
        raise Refused(401, f"{detail}: send Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > LARGEST:
            raise Refused(413, f"a request may hold {LARGEST >> 20} MiB")
    return bytes(data)


def _rows(body: bytes) -> tuple[list[str], list[str]]:
    """Prompts and responses of a request, or the sentence that says what is wrong with it."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(422, "the body must be JSON") from None
    if not isinstance(given, dict) or set(given) != {"prompts", "responses"}:
        raise Refused(422, 'the body must be {"prompts": [...], "responses": [...]}')
    for name, texts in given.items():
        if not isinstance(texts, list):
            raise Refused(422, f"{name} must be a list of texts, not {shown_value(texts)}")
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise Refused(422, f"{name}[{row}] must be a text, not {shown_value(text)}")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise Refused(422, f"{name}[{row}] must be a text, but holds half a surrogate pair")
    prompts, responses = given["prompts"], given["responses"]
    if len(prompts) != len(responses):
        raise Refused(422, f"prompts and responses must be as many, not {len(prompts)} and {len(responses)}")
    if len(prompts) > MOST_ROWS:
        raise Refused(422, f"at most {MOST_ROWS} rows in a request, not {len(prompts)}")
    return prompts, responses
