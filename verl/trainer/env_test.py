"""`verl env test`: a few conversations with the environment, tools and users of a run, before any training.

Data, conversations and rewards are those of `verl train` with the same keys; only the turns of the model may come from
somebody else (`verl/agents/stand_ins.py`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.parallelism import counted
from verl.errors import CommandAnswered, ConfigError
from verl.observe.console import counting
from verl.runtime import run_command

if TYPE_CHECKING:
    from verl.agents.conversation import Conversation
    from verl.agents.runner import ConversationRunner, ConversationSampler
    from verl.config.schema import PPOConfig
    from verl.data.proto import DataProto
    from verl.data.rl_dataset import RLDataset
    from verl.reward import RewardManager, RewardResult

logger = logging.getLogger(__name__)

_MODEL = "actor_rollout_ref.model.path"
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_LONGEST = 400
"""Characters of a message that are shown."""
_NO_LIMIT = 1 << 24
_CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ 'tool result' if message.role == 'tool' else message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ABOUT = """Tries the environment, tools and users of a run: conversations with turns, rewards, errors and times.
Takes the keys of `verl train` (`verl train --help`), a YAML file of them, --config-path and --config-name.
Ends with 1 where a conversation failed."""


def build_parser(own: bool = False) -> argparse.ArgumentParser:
    """Its options and those of `verl train`, or only its own."""
    from verl.config.sources import OPTIONS

    parser = argparse.ArgumentParser(
        prog="verl env test",
        usage="verl env test [FILE.yaml] [options] key=value ...",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        parents=[] if own else [OPTIONS],
    )
    add = parser.add_argument
    add("--conversations", "-n", type=int, default=4, help="how many, over the first rows (default: 4)")
    add("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint writes the turns of the model")
    add("--model", help="its model (default: the first it lists)")
    add(
        "--api-key-env",
        default="OPENAI_API_KEY",
        help="the variable that holds its key (default: %(default)s)",
    )
    add("--by-hand", action="store_true", help="you type the turns: text, or a call as /name argument=value")
    add("--prompt", help="one row with this message of the user, in place of data.train_files")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(build_parser().format_help())
        return 0
    try:
        args, words = build_parser(own=True).parse_known_args(arguments)
    except SystemExit as error:  # argparse has said why
        raise CommandAnswered(error.code) from None
    if args.conversations < 1:
        raise ConfigError(f"--conversations is {args.conversations}; it must be at least 1")
    if args.endpoint and args.by_hand:
        raise ConfigError("--endpoint and --by-hand both write the turns of the model; give one of them")
    return try_environment(load(words, args), args)


def load(words: list[str], args: argparse.Namespace) -> PPOConfig:
    """The config of a run; what a try does not need may be missing."""
    from verl.config.checks import check, errors_alone
    from verl.config.load import load_config
    from verl.config.schema import PPOConfig

    cfg = load_config(PPOConfig, words, checked=False)
    model, multi_turn = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.multi_turn
    if f"{_MULTI_TURN}.enable" in cfg.user_set and not multi_turn.enable:
        raise ConfigError(f"'{_MULTI_TURN}.enable' is False: there is no conversation to try; set it to True")
    multi_turn.enable = multi_turn.enable or not cfg.actor_rollout_ref.rollout.runs_agents
    written = args.endpoint or args.by_hand
    if written and cfg.actor_rollout_ref.rollout.runs_agents:
        raise ConfigError("an agent asks for tokens: try it with a model, without --endpoint and --by-hand")
    if written:
        multi_turn.format = "hermes"
    given = model.path, cfg.data.train_files
    if written and not model.path:
        model.path = "none"
    if args.prompt is not None:
        cfg.data.train_files, cfg.data.mixture = [args.prompt], []
    if errors := errors_alone(cfg):
        raise ConfigError("\n".join(errors))
    try:
        check(cfg)
    except ConfigError as error:  # what is wrong with the training alone does not concern a try
        logger.warning("verl train would refuse this config: %s", error)
    model.path, cfg.data.train_files = given
    return cfg


@dataclass
class Try:
    """One conversation and what it is worth."""

    conversation: Conversation
    result: RewardResult
    row: str
    scored: bool
    """Whether a reward function or model gave a score, besides the environment."""

    @property
    def error(self) -> str | None:
        if self.conversation.error is None and self.conversation.finish_reason == "abort":
            return "the turn was ended early"
        return self.conversation.error or self.result.error

    @property
    def reward(self) -> float | None:
        """What training would sum up; None where it would mask the conversation, and where nothing gives rewards."""
        given = [turn.reward for turn in self.conversation.turns]
        given += [self.conversation.environment_reward, self.result.score if self.scored else None]
        rewards = [reward for reward in given if reward is not None]
        return None if self.result.score is None or not rewards else sum(rewards)

    def plain(self) -> dict[str, Any]:
        talk = self.conversation
        turns = [
            {
                "role": turn.role,
                "messages": [message["content"] for message in turn.messages],
                "reward": turn.reward,
                "tool_calls": [asdict(record) for record in turn.records],
            }
            for turn in talk.turns
        ]
        return {
            "row": self.row,
            "prompt": talk.messages[: len(talk.messages) - sum(len(turn.messages) for turn in talk.turns)],
            "turns": turns,
            "finish_reason": talk.finish_reason,
            "reward": self.reward,
            "environment_reward": talk.environment_reward,
            "score": self.result.score if self.scored else None,
            "score_extra": self.result.extra,
            "error": self.error,
            "tokens": len(talk.token_ids),
            "seconds": talk.seconds,
        }


def try_environment(cfg: PPOConfig, args: argparse.Namespace) -> int:
    """Run the conversations and report them; 1 where one failed."""
    tries: list[Try] = []
    with ExitStack() as stack:
        sampler, dataset, rewards = stack.enter_context(opened(cfg, args))
        ended = lambda: None  # noqa: E731
        if not args.by_hand:
            ended = stack.enter_context(counting("conversations", args.conversations)).advance
        positions = [number % len(dataset) for number in range(args.conversations)]
        # A person answers one at a time; others all at once.
        size = 1 if args.by_hand else len(positions)
        for start in range(0, len(positions), size):
            chosen = positions[start : start + size]
            uids = [f"try-{start + number}" for number in range(len(chosen))]
            new = converse(cfg, sampler(), dataset.batch(chosen, uids), rewards, ended)
            tries += [
                Try(
                    *pair,
                    dataset.rows.origin(dataset.row_number(position)),
                    scored=hasattr(rewards, "signatures"),
                )
                for pair, position in zip(new, chosen, strict=True)
            ]
            for number in range(start, len(tries)) if not args.json else ():
                _print(conversation_text(number + 1, tries[number]))
    if args.json:
        _print(
            json.dumps(
                {"conversations": [each.plain() for each in tries], "summary": summary(tries)}, default=str
            )
        )
    else:
        _print(summary_text(tries))
    return 1 if any(each.error for each in tries) else 0


@contextmanager
def opened(
    cfg: PPOConfig, args: argparse.Namespace
) -> Iterator[tuple[Callable[[], ConversationSampler], RLDataset, RewardManager]]:
    """What builds a sampler, the rows and the rewards."""
    from verl.data.files import Rows
    from verl.data.rl_dataset import RLDataset, mixture_rows
    from verl.reward.managers import NoRewards, chooses_reward
    from verl.runtime import quiet_transformers, seed_everything
    from verl.trainer.assembly import open_rewards
    from verl.trainer.setup import open_agents

    seed_everything(cfg.trainer.seed)
    quiet_transformers()
    with ExitStack() as stack:
        path, tokenizer, open_sampler = _policy(cfg, args, stack)
        folder = Path(cfg.trainer.default_local_dir)
        agents = open_agents(cfg, cfg.actor_rollout_ref.rollout, tokenizer, path, folder)
        assert agents is not None
        stack.callback(agents.close)
        rows = mixture_rows(cfg.data)[1]
        if args.prompt is not None:
            row = {cfg.data.prompt_key: [{"role": "user", "content": args.prompt}]}
            rows = Rows.from_list([row], "--prompt")
        dataset = RLDataset(cfg.data, rows or cfg.data.train_files, tokenizer, tools=agents.schemas)
        agents.check_data(dataset)
        rewards: RewardManager = NoRewards()
        if args.prompt is None or chooses_reward(cfg.reward):
            rewards = open_rewards(cfg, tokenizer, agents, None)
        stack.callback(rewards.close)
        rewards.check(dataset.data_sources(), dataset.rows.column_names)
        yield open_sampler(agents), dataset, rewards


def _policy(
    cfg: PPOConfig, args: argparse.Namespace, stack: ExitStack
) -> tuple[str, Any, Callable[[ConversationRunner], Callable[[], ConversationSampler]]]:
    """The folder of the model, its tokenizer, and what builds the samplers of a runner, for who writes the turns."""
    from verl.config.model_path import folder_problem
    from verl.config.schema import GenerationModelConfig
    from verl.data.tokenizer import load_tokenizer
    from verl.trainer.generation_model import choose_model
    from verl.trainer.preflight import hub_problems

    section = cfg.actor_rollout_ref.model
    written = args.endpoint or args.by_hand
    if written and not section.path:
        logger.info("without %s limits in tokens are not applied", _MODEL)
        longest, multi_turn = cfg.data.max_response_length, cfg.actor_rollout_ref.rollout.multi_turn
        cfg.data.max_prompt_length = cfg.data.max_response_length = _NO_LIMIT
        multi_turn.max_tool_response_length = _NO_LIMIT
        return "", plain_tokenizer(), lambda agents: _written(agents, args, stack, longest)
    choice = choose_model(GenerationModelConfig(section.path, tokenizer_path=section.tokenizer_path))
    problem = None if written else folder_problem(choice.path, _MODEL)
    if problems := [problem] if problem else hub_problems({_MODEL: choice.path}):
        raise ConfigError("\n".join(problems))
    tokenizer = load_tokenizer(choice.tokenizer, section.trust_remote_code, cfg.data.chat_template)
    if written:
        longest = cfg.data.max_response_length
        return choice.path, tokenizer, lambda agents: _written(agents, args, stack, longest)

    def generated(agents: ConversationRunner) -> Callable[[], ConversationSampler]:
        from verl.workers.generation import load_engine

        rollout = cfg.actor_rollout_ref.rollout
        engine = load_engine(rollout, section, cfg.trainer, choice.path, choice.adapter, tokenizer)
        stack.enter_context(closing(engine))
        return lambda: agents.sampler(engine)

    return choice.path, tokenizer, generated


def _written(
    agents: ConversationRunner, args: argparse.Namespace, stack: ExitStack, longest: int
) -> Callable[[], ConversationSampler]:
    from verl.agents.chat_endpoint import ChatEndpoint, EndpointKeys
    from verl.agents.stand_ins import EndpointSampler, TypedSampler, ask_terminal

    if args.by_hand:
        return lambda: TypedSampler(agents, ask_terminal)
    endpoint = ChatEndpoint(
        "The endpoint",
        args.endpoint,
        args.model,
        args.api_key_env,
        keys=EndpointKeys("--endpoint", "--model", "--api-key-env"),
        concurrency=agents.cfg.max_concurrent_requests,
    )
    stack.callback(lambda: agents.agents.wait_for(endpoint.close()))
    agents.agents.wait_for(endpoint.open())
    return lambda: EndpointSampler(agents, endpoint, longest)


def converse(
    cfg: PPOConfig,
    sampler: ConversationSampler,
    prompts: DataProto,
    rewards: RewardManager,
    ended: Callable[[], None],
) -> list[tuple[Conversation, RewardResult]]:
    """One conversation for each prompt, scored as in training; `ended` is called when one has ended."""
    from verl.trainer.experience import submit_rewards
    from verl.workers.roles import training_settings

    rollout = cfg.actor_rollout_ref.rollout
    failed: dict[int, RewardResult] = {}
    settings = replace(training_settings(rollout, cfg.data.max_response_length, step=0), n=1)
    tokenizer = sampler.turns.chat.tokenizer

    def on_finish(row: int, conversation: Conversation) -> None:
        failed.update(submit_rewards(rewards, tokenizer, prompts, [(row, conversation)]))
        ended()

    conversations = sampler.collect(prompts, settings, on_finish)
    results = rewards.collect() | failed
    return [(conversation, results[row]) for row, conversation in enumerate(conversations)]


def plain_tokenizer() -> Any:
    """Bytes as tokens, ChatML as template: for tries without a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate([*special, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=special[0],
        eos_token=special[2],
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML,
    )


# ---- the report


def summary(tries: Sequence[Try]) -> dict[str, Any]:
    """Numbers of all conversations; turns and tools under the names that they have as metrics of a run."""
    from verl.agents.conversation import conversation_metrics

    talks = [each.conversation for each in tries]
    rewards = [each.reward for each in tries if each.reward is not None]
    seconds = [talk.seconds for talk in talks]
    return {
        "conversations": len(tries),
        "failed": sum(each.error is not None for each in tries),
        "finish_reasons": dict(Counter(talk.finish_reason for talk in talks)),
        "reward/mean": sum(rewards) / len(rewards) if rewards else None,
        "reward/min": min(rewards, default=None),
        "reward/max": max(rewards, default=None),
        "tokens/mean": sum(len(talk.token_ids) for talk in talks) / len(talks),
        "seconds/mean": sum(seconds) / len(seconds),
        "seconds/max": max(seconds),
        **conversation_metrics(talks),
    }


def conversation_text(number: int, each: Try) -> str:
    talk, lines = each.conversation, []
    prompt = len(talk.messages) - sum(len(turn.messages) for turn in talk.turns)
    lines += [f"  {message['role']:<10} {_short(message['content'])}" for message in talk.messages[:prompt]]
    for turn in talk.turns:
        reward = "" if turn.reward is None else f"   [reward {turn.reward:g}]"
        lines += [f"  {turn.role:<10} {_short(message['content'])}{reward}" for message in turn.messages]
        for record in turn.records:
            arguments = ", ".join(f"{name}={value!r}" for name, value in record.arguments.items())
            outcome = f"{record.failure}: {_short(record.result)}" if record.failure else "ok"
            earned = "" if record.reward is None else f", reward {record.reward:g}"
            lines.append(
                f"    call     {record.name}({_short(arguments)}): {outcome}{earned}, {record.seconds:.2f} s"
            )
    parts = {
        "turns": sum(turn.reward for turn in talk.turns if turn.reward is not None) or None,
        "environment": talk.environment_reward,
        "reward function": each.result.score if each.scored else None,
    }
    shown = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
    total = "none" if each.reward is None else f"{each.reward:g}"
    lines.append(f"  reward     {total}" + (f" ({shown})" if shown else ""))
    if each.error is not None:
        lines.append(f"  ERROR      {each.error}")
    turns = len(talk.model_turns)
    title = (
        f"conversation {number}, {each.row}: {turns} turn{'s' * (turns != 1)}, ended by {talk.finish_reason}"
    )
    return "\n".join([f"{title}, {len(talk.token_ids):,} tokens, {talk.seconds:.2f} s", *lines, ""])


def summary_text(tries: Sequence[Try]) -> str:
    numbers = summary(tries)
    calls = int(numbers["tools/calls/all"])
    kinds = {
        kind: int(numbers[f"tools/{kind}/all"]) for kind in ("failed", "timeout", "unknown", "malformed")
    }
    wrong = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "none failed"
    reward = "none"
    if numbers["reward/mean"] is not None:
        reward = f"{numbers['reward/mean']:.3f} mean, {numbers['reward/min']:g} to {numbers['reward/max']:g}"
    ends = ", ".join(f"{reason} {count}" for reason, count in numbers["finish_reasons"].items())
    lines = [
        f"{counted(len(tries), 'conversation')}, {numbers['failed']} failed",
        f"  turns       {numbers['agents/turns/mean']:.1f} mean, {numbers['agents/turns/max']:g} at most",
        f"  ended by    {ends}",
        f"  tool calls  {calls}, {wrong}" if calls else "  tool calls  0",
        f"  reward      {reward}",
        f"  tokens      {numbers['tokens/mean']:.0f} mean, after the prompt",
        f"  seconds     {numbers['seconds/mean']:.2f} mean, {numbers['seconds/max']:.2f} at most",
    ]
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
