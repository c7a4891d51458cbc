"""``python -m rlhf_lightning.chat RUN``: talk to a trained model in the terminal."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

from rlhf_lightning.config.locate import locate
from rlhf_lightning.config.network import stay_local
from rlhf_lightning.config.subject import Subject, find_subject
from rlhf_lightning.config.words import count
from rlhf_lightning.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    args = _parse(argv)
    try:
        return _chat(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_lightning.chat",
        description="Talk to a trained model; /help inside shows the commands. Messages may also come from a "
        "pipe, one a line.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="run, folder or hub id of an adapter, folder of a model, tiny"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.7, help="0: greedy (default %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=count, default=200, help="of one answer (default %(default)s)"
    )
    parser.add_argument(
        "--reward", metavar="RM_RUN", help="reward model behind /score (default: the run's own)"
    )
    parser.add_argument("--system", metavar="TEXT", help="first message of the conversation")
    parser.add_argument(
        "--plain", action="store_true", help="no chat template: the model goes on from the text"
    )
    parser.add_argument(
        "--model", metavar="BASE", help="the base model's folder or hub id, where it has moved"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    return parser.parse_args(argv)


def _chat(args: argparse.Namespace) -> int:
    subject = find_subject(args.run, base=args.model)  # before anything heavy
    if subject.judges:
        raise UserError(
            f"RUN={args.run} holds a reward model, not a policy: give a policy, and --reward {args.run}"
        )
    reward, no_reward = _reward(args.reward, subject)
    no_reference = _no_reference(subject)
    stay_local([subject.adapter, subject.model.path, subject.model.adapter, reward])
    print(f"{subject.text}; loading ...", file=sys.stderr, flush=True)

    from rlhf_lightning.chatting.conversation import Conversation
    from rlhf_lightning.chatting.loop import Answering, Chat
    from rlhf_lightning.config.rewards import LearnedRewardConfig
    from rlhf_lightning.data.dialogue import ChatTemplate
    from rlhf_lightning.loading import load_roles, pick_device, quiet
    from rlhf_lightning.rewards.learned import LearnedReward

    quiet()
    roles = load_roles(
        subject,
        device=pick_device(args.device),
        temperature=args.temperature or 1.0,
        reference=no_reference is None,
        reward=reward,
    )
    backbone = roles.backbone
    room = backbone.context_length - args.max_new_tokens
    if room < 1:
        raise UserError(
            f"--max-new-tokens {args.max_new_tokens} leaves no room for a message: the model's context has "
            f"{backbone.context_length} tokens"
        )
    template = None if args.plain else ChatTemplate.of(backbone.tokenizer)
    judge = None
    if reward is not None:
        options = LearnedRewardConfig(kind="learned", path=reward)
        judge = LearnedReward(roles.score, backbone.tokenizer, options, context=backbone.context_length)
    chat = Chat(
        roles,
        Conversation(backbone.tokenizer, room, template, args.system),
        Answering(args.max_new_tokens, greedy=args.temperature == 0, seed=args.seed),
        judge,
        no_reward,
        no_reference,
    )
    chat.note("/help shows the commands" + ("" if template else "; no chat template: the text is continued"))
    for line in _lines():
        if not chat.take(line):
            break
    return 0


def _reward(given: str | None, subject: Subject) -> tuple[str | None, str]:
    """The reward adapter behind /score; and why there is none, where there is none."""
    if given is not None:
        locate(given, key="--reward", want="reward")
        return given, ""
    own = subject.learned_reward
    if own is None:
        return None, "this run learned from no reward model: name one with --reward RM_RUN"
    try:
        locate(own, key="reward.path", want="reward")
    except UserError as error:
        return None, f"the run's own reward model is gone ({error}): name one with --reward RM_RUN"
    return own, ""


def _no_reference(subject: Subject) -> str | None:
    """Why what the policy started from cannot be asked; None: it can."""
    start = subject.model.adapter
    try:
        if start is not None:
            locate(start, key="model.adapter", want="policy")
    except UserError as error:
        return f"what the policy started from is gone ({error})"
    return None


def _lines() -> Iterator[str]:
    """Messages, from a person or a pipe; a person's Ctrl-C at the prompt changes nothing."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history at the prompt
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number from 0, not {text!r}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
