"""``python -m rlhf_lightning.serve_reward RUN``: a trained reward model for other machines to ask."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from rlhf_lightning.config.network import stay_local
from rlhf_lightning.config.words import count
from rlhf_lightning.errors import UserError

TOKEN = "RLHF_REWARD_TOKEN"
CLOSING_S = 5  # open requests are waited for so long after Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    args = _parse(argv)
    try:
        return _serve(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_lightning.serve_reward",
        description="Serve a trained reward model: POST /score, GET /health. A token for /score is taken "
        f"from the environment, {TOKEN}.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="run of stage=reward, folder or hub id of a reward adapter, or tiny"
    )
    parser.add_argument("--model", help="folder or hub id of the backbone, where RUN names it wrongly")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: every network (default %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="0: any free one (default %(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="answers in one forward pass")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    return parser.parse_args(argv)


def _serve(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from rlhf_lightning.serving.app import make_app
    except ModuleNotFoundError as error:
        raise UserError(
            f"the server needs {error.name}: pip install 'rlhf-lightning[serve]', or pip install {error.name}"
        ) from error
    from rlhf_lightning.serving.find import find_reward_model

    found = find_reward_model(args.run, base=args.model)  # a wrong folder is told before anything is loaded
    with _bind(args.host, args.port) as bound:
        stay_local([found.model.path])
        from rlhf_lightning.loading import pick_device, quiet
        from rlhf_lightning.serving.load import load_reward_model

        quiet()
        device = pick_device(args.device)
        model = load_reward_model(args.run, base=args.model, batch_size=args.batch_size, device=device)
        token = os.environ.get(TOKEN, "").strip() or None
        app = make_app(model.reward, model=model.name, token=token)
        print(_greeting(model.description, args.host, bound.getsockname()[1], token is not None), flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=CLOSING_S)
        try:
            uvicorn.Server(config).run(sockets=[bound])
        except OSError as error:  # two that were bound, and the other listened first
            raise UserError(_taken(args.host, args.port, error)) from error
    return 0


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a port in use is known before the model is loaded.

    Raises:
        UserError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # elsewhere it would let two servers share a port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise UserError(_taken(host, port, error)) from error
    return bound


def _taken(host: str, port: int, error: OSError) -> str:
    return f"--host {host} --port {port} cannot be served ({error.strerror or error}): take another"


def _greeting(description: str, host: str, port: int, asks: bool) -> str:
    here = host in ("127.0.0.1", "localhost", "::1")
    everywhere = host in ("0.0.0.0", "::", "")
    name = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
    lines = [
        description,
        f"ready at http://{name}:{port}/score (GET /health says so); Ctrl-C ends it",
        f"token: {f'as in {TOKEN}, which the other side sets too' if asks else 'none is asked'}",
        f"use it: python train.py reward=http reward.url=http://{name}:{port}/score",
    ]
    if here:
        lines.append(f"from another machine, first there: ssh -N -L {port}:127.0.0.1:{port} THIS_MACHINE")
    elif not asks:
        lines.append(f"note: whoever reaches {name}:{port} can have answers scored; {TOKEN} closes it")
    return "\n".join(lines)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, not {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
