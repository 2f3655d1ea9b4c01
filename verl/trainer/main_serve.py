"""`verl serve MODEL`: a model behind the HTTP interfaces of OpenAI and Anthropic (`verl/serve`)."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

from verl.errors import CommandAnswered, ConfigError, missing_package
from verl.runtime import quiet_transformers, run_command

if TYPE_CHECKING:
    from verl.config.schema import GenerationConfig
    from verl.serve.served_model import ServedModel

logger = logging.getLogger(__name__)

KEY_VARIABLE = "VERL_SERVE_API_KEY"
_CONTEXT = 32768
"""Tokens of prompt and answer, of a model that names no limit."""
_ABOUT = """Serves a model over HTTP: /v1/chat/completions, /v1/responses, /v1/completions, /v1/messages, /v1/models,
/tokenize, /health and /metrics. MODEL is a Hugging Face folder or id, a run folder or a checkpoint of a run.
The engine has the keys of `verl generate` (`verl generate --help`): rollout.name=vllm, rollout.dtype=bfloat16,
trainer.device=cpu, data.chat_template=FILE, ..."""
_DATA = (
    "apply_chat_template", "apply_chat_template_kwargs", "chat_template", "parse_special_tokens", "system_prompt",
)  # fmt: skip
_REQUESTS = (
    "agent", "ignore_eos", "min_p", "multi_turn", "n", "per_request_seed", "raw_log_probs", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p",
)  # fmt: skip
"""Of the rollout section: what every request says for itself."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl serve",
        usage="verl serve MODEL [options] [key=value ...]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face folder or id, run folder or checkpoint")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port; 0: any free one (default: %(default)s)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send (default: the variable {KEY_VARIABLE}, else a new one, which is printed)",
    )
    add("--name", help="what clients call the model (default: MODEL as given)")
    add(
        "--max-tokens",
        type=int,
        default=1024,
        help="of an answer whose request names no number (default: %(default)s)",
    )
    add(
        "--max-samples",
        type=int,
        default=256,
        help="under way at a time; more are answered with 429 (default: %(default)s)",
    )
    add(
        "--max-body",
        type=int,
        default=16 << 20,
        metavar="BYTES",
        help="of a request (default: %(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    try:
        args, words = build_parser().parse_known_args(arguments)
    except SystemExit as error:  # argparse has said why, or given help
        raise CommandAnswered(error.code) from None
    for name in ("max_tokens", "max_samples", "max_body"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    wrong = [word for word in words if word.startswith("-")]
    if wrong:
        raise ConfigError(f"unknown option {wrong[0]}; `verl serve --help` lists all")
    with ExitStack() as stack:
        serve(args, load(args.model, words), stack)
    return 0


def load(model: str, words: list[str]) -> GenerationConfig:
    """The config of an engine that serves."""
    from verl.config.load import load_config
    from verl.config.machine import machine_errors
    from verl.config.schema import GenerationConfig

    cfg = load_config(GenerationConfig, words, checked=False)
    for name in sorted(cfg.user_set):
        section, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if name == "model.path" or (section == "data" and part not in _DATA):
            raise ConfigError(f"'{name}' is a key of `verl generate` that `verl serve` does not have")
        if section == "rollout" and part in _REQUESTS:
            raise ConfigError(f"'{name}': every request says this for itself")
    cfg.model.path = model
    if problems := machine_errors(cfg):
        raise ConfigError("\n".join(problems))
    return cfg


def serve(args: argparse.Namespace, cfg: GenerationConfig, stack: ExitStack) -> None:
    """Until Ctrl-C or SIGTERM."""
    try:
        from verl.serve.app import address, build_app, build_server, listen
        from verl.serve.wire import Door
    except ImportError as error:
        raise missing_package(str(error.name).partition(".")[0], "serve", "verl serve") from error

    given = args.api_key or os.environ.get(KEY_VARIABLE)
    key = given or secrets.token_urlsafe(24)
    listening = stack.enter_context(closing(listen(args.host, args.port)))  # before the model takes its time
    model = open_model(cfg, args, stack)
    server = build_server(build_app(Door(model, key, args.max_body)))
    logger.info("%s at %s/v1", model.name, address(listening))
    if not given:
        logger.info("key: %s", key)
    server.run(sockets=[listening])


def open_model(cfg: GenerationConfig, args: argparse.Namespace, stack: ExitStack) -> ServedModel:
    """The model, its engine and its thread; closed with `stack`."""
    from verl.config.model_path import folder_problem
    from verl.data.chat import ChatFormat
    from verl.data.tokenizer import generation_stop_ids, load_tokenizer
    from verl.models.loading import load_config as load_model_config
    from verl.rollout.sequence import eos_token_ids
    from verl.serve.draws import EngineThread
    from verl.serve.served_model import ServedModel
    from verl.trainer.generation_model import choose_model
    from verl.trainer.preflight import hub_problems
    from verl.workers.generation import open_engine

    quiet_transformers()
    choice = choose_model(cfg.model)
    problem = folder_problem(choice.path, "MODEL")
    if problems := [problem] if problem else hub_problems({"MODEL": choice.path}):
        raise ConfigError("\n".join(problems))
    tokenizer = load_tokenizer(choice.tokenizer, cfg.model.trust_remote_code, cfg.data.chat_template)
    config = load_model_config(
        choice.path,
        trust_remote_code=cfg.model.trust_remote_code,
        override_config=cfg.model.override_config,
    )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or _CONTEXT
    given = cfg.rollout.max_model_len if "rollout.max_model_len" in cfg.user_set else None
    cfg.rollout.max_model_len = context = min(given or positions, positions)
    engine = stack.enter_context(open_engine(cfg, choice.path, choice.adapter, tokenizer))
    thread = stack.enter_context(closing(EngineThread(engine, args.max_samples)))
    return ServedModel(
        name=args.name or args.model,
        chat=ChatFormat.of(tokenizer, cfg.data),
        engine=thread,
        end_ids=eos_token_ids(SimpleNamespace(config=config), tokenizer)
        | {*generation_stop_ids(choice.path)},
        context=context,
        default_tokens=args.max_tokens,
        created=int(time.time()),
    )


if __name__ == "__main__":
    sys.exit(main())
