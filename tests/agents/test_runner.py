"""Conversations over a real engine with real tool processes: their tokens, and that only seed and prompt decide."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.agents.chat_tokenizers import FAMILIES, chat_tokenizer
from tests.agents.conversations import TOOLS, WORLD, Talk, by_name, settings_of
from verl.agents.conversation import Conversation, prompt_messages
from verl.agents.runner import ConversationRunner
from verl.config.schema import ActorConfig, DataConfig, ModelConfig
from verl.data.files import Rows
from verl.data.rl_dataset import RLDataset
from verl.engines import build_engine
from verl.errors import ConfigError, DataError
from verl.rollout.base import GenerationSettings, SamplingParams
from verl.workers.roles import rollouts_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "world.py").write_text(WORLD)
    return {"tools": [f"{folder}/tools.py"], "environment": [f"{folder}/world.py:World"]}


@pytest.fixture(scope="module")
def world(files: dict[str, list[str]]) -> Iterator[Talk]:
    """An environment with tools, a user and rewards, in a template that keeps history."""
    talk = Talk("qwen2_5", settings_of(environment=files["environment"]))
    with closing(talk.runner):
        yield talk


@pytest.mark.slow(seconds=3)
def test_conversations_depend_on_seed_uid_sample_and_turn_only(world: Talk) -> None:
    whole = by_name(world.run(range(4), n=3))
    assert [name.split("#")[0] for name in whole] == [f"p{i}" for i in range(4) for _ in range(3)]
    assert len({str(each) for each in whole.values()}) == 12, "samples differ"
    assert {each[7] for each in whole.values()} >= {"stop", "turns"}, "they end in different ways"

    others: dict[str, Any] = {}
    for number in random.Random(5).sample(range(4), 4):
        others |= by_name(world.run([number], n=1))
    assert others == {name: each for name, each in whole.items() if name.endswith("#0")}

    engine, world.engine = world.engine, world.new_engine(max_num_seqs=2, max_num_batched_tokens=256)
    try:
        assert by_name(world.run([3, 1, 0, 2], n=3)) == whole
    finally:
        world.engine = engine
    assert by_name(world.run(range(4), n=3, seed=4)) != whole


def test_rows_are_what_the_engine_was_asked_and_answered(world: Talk) -> None:
    found = world.run(range(4), n=3)
    assert any(len(conversation.model_turns) > 2 for conversation in found)
    for conversation in found:
        row, asked_before = [*conversation.prompt_ids, *conversation.token_ids], []
        for number, turn in enumerate(conversation.model_turns):
            name = f"{conversation.uid}#{conversation.sample}/{number}"
            asked, answered = list(world.requests[name].prompt_ids), world.responses[name]
            start, end = (len(conversation.prompt_ids) + at for at in (turn.start, turn.end))
            assert row[:start] == asked and row[start:end] == answered.token_ids
            assert asked[: len(asked_before)] == asked_before, "the next prompt begins with this turn"
            asked_before = [*asked, *answered.token_ids]
            span = slice(turn.start, turn.end)
            assert conversation.log_probs[span] == answered.log_probs
            assert conversation.response_mask[span] == [1] * len(answered.token_ids)
        own = sum(turn.end - turn.start for turn in conversation.model_turns)
        assert sum(conversation.response_mask) == own
    spans = [
        conversation.token_ids[turn.start : turn.end]
        for conversation in found
        for turn in conversation.model_turns
    ]
    encoded = [world.runner.turns.chat.encode([world.tokenizer.decode(span)])[0] for span in spans]
    assert any(span != again for span, again in zip(spans, encoded, strict=True)), "encoding again would show"


def test_kept_prefixes_are_not_computed_again(world: Talk) -> None:
    engine, world.engine = world.engine, world.new_engine()
    try:
        found = world.run(range(2), n=1)
        asked = sum(len(request.prompt_ids) for request in world.requests.values())
        assert sum(len(conversation.model_turns) for conversation in found) > 3
        assert world.engine.stats().prefilled_tokens < asked / 2
        assert not world.engine.poll(0)
        assert world.engine.stats().kv_blocks_used == 0, "nothing is kept of conversations that have ended"
    finally:
        world.engine = engine


QUICK = (("llama3", "environment", "append"), ("gemma", "tools", "append"), ("qwen3", "environment", "split"))
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow(seconds=2))
    for case in itertools.product(FAMILIES, ("tools", "environment"), ("append", "split"))
]


@pytest.mark.parametrize(("family", "kind", "history"), CASES)
def test_the_trainer_sees_the_rollouts_distribution(
    files: dict[str, list[str]], family: str, kind: str, history: str
) -> None:
    cfg = settings_of(history=history, **{kind: files[kind]})
    if history == "append" and kind == "environment" and family in ("qwen3", "mistral"):
        with pytest.raises(ConfigError, match=f"chat template of '{family}'.*history=split"):
            Talk(family, cfg)
        return
    talk = Talk(family, cfg)
    with closing(talk.runner):
        check_log_probs(talk)
        if history == "append":
            check_rendering(talk)


def check_log_probs(talk: Talk) -> None:
    from verl.data.assemble import split_turns

    settings = GenerationSettings(SamplingParams(max_tokens=900, temperature=0.8), n=3, seed=1)
    talk.requests.clear()
    prompts = talk.prompts(range(2))
    batch = rollouts_of(prompts, talk.sampler().collect(prompts, settings), settings.n, 0)
    roles = {turn.role for each in batch.non_tensor_batch["conversation"] for turn in each.turns}
    assert roles == {"assistant", "tool", *(["user"] if talk.runner.agents.has_user else [])}
    if talk.cfg.history == "split":
        batch = split_turns(batch, 0)
    trainer = build_engine("actor", ModelConfig(), ActorConfig(), model=talk.model, device="cpu")
    mask = batch.batch["response_mask"]
    found = trainer.log_probs(batch, temperature=0.8)["log_probs"] * mask
    expected = batch.batch["rollout_log_probs"]
    assert mask.sum() > 10 and (expected[mask.bool()] < -0.1).any() and (expected[~mask.bool()] == 0).all()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def check_rendering(talk: Talk) -> None:
    """The row is the rendering of the messages, but for whitespace before a turn, which is as drawn."""
    turns, schemas = talk.runner.turns, talk.runner.agents.schemas({})
    for conversation in talk.run(range(2)):
        messages = conversation.messages
        assert messages[-1]["role"] == "assistant", "what the model did not read is not part of it"
        row = talk.tokenizer.decode([*conversation.prompt_ids, *conversation.token_ids])
        if turns._as_calls:
            # The template takes calls as data only: what it writes for those is put back to what was drawn.
            pairs = list(zip(messages, [*messages[1:], {"role": ""}], strict=True))
            calls = [{"id": "call00000", "function": {"name": "ask", "arguments": {}}}]
            data = {"role": "assistant", "content": "", "tool_calls": calls}
            texts = iter(
                [m["content"] for m, after in pairs if m["role"] == "assistant" and after["role"] == "tool"]
            )
            messages = [
                data if m["role"] == "assistant" and after["role"] == "tool" else m for m, after in pairs
            ]
            rendered = turns._render(messages, generate=False, tools=schemas)
            rendered = re.sub(r"\[TOOL_CALLS\].*?</s>", lambda _, texts=texts: f"{next(texts)}</s>", rendered)
            rendered = re.sub(r"(\[/(?:INST|TOOL_RESULTS)\]) ", r"\1", rendered)
        else:
            rendered = turns._render(messages, generate=False, tools=schemas)
        if talk.tokenizer.name_or_path == "qwen3":  # puts an empty block in front of the last turn only
            rendered = rendered.replace("<think>\n\n</think>\n\n", "")
        assert rendered.rstrip("\n") == row


# ---- what goes wrong


@pytest.fixture
def make(write: Callable[..., str]) -> Iterator[Callable[..., Talk]]:
    """A runner with an environment of this text."""
    made: list[Talk] = []

    def make(text: str, **changes: Any) -> Talk:
        talk = Talk("qwen2_5", settings_of(environment=[write(text)], **changes))
        made.append(talk)
        return talk

    yield make
    for talk in made:
        talk.runner.close()


ALIVE = """
import os

class World:
    def reset(self, start, **row):
        with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
            file.write(f"{os.getpid()}\\n")
        self.start = start

    def ask(self, text: str) -> str:
        '''Answer.

        Args:
            text: anything
        '''
        return "yes"

    def reward(self):
        return self.start
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("where", ["on_finish", "engine", "template"])
def test_a_failure_leaves_the_engine_idle_and_no_process_behind(
    make: Callable[..., Talk], tmp_path: Path, gone: Callable[[int], bool], monkeypatch: Any, where: str
) -> None:
    talk = make(ALIVE)
    settings = GenerationSettings(SamplingParams(max_tokens=900), n=2, seed=3)

    def fail(*_: Any) -> Any:
        raise RuntimeError("as planned")

    with monkeypatch.context() as patch:
        if where == "engine":
            patch.setattr(talk.engine, "poll", fail)
        elif where == "template":
            patch.setattr(talk.runner.turns, "after", fail)
        with pytest.raises(RuntimeError, match="as planned"):
            on_finish = fail if where == "on_finish" else None
            talk.runner.run(talk.engine, talk.prompts(range(4)), settings, on_finish)
    if where == "engine":
        talk.engine.abort()
        while talk.engine.poll():
            pass
    stats = talk.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 1 and all(gone(pid) for pid in pids)
    found = talk.run(range(2))
    assert [each.environment_reward for each in found] == [0.0, 0.0, 1.0, 1.0], "and the next batch is whole"


def test_an_environment_without_its_rewards_has_no_score(make: Callable[..., Talk]) -> None:
    text = ALIVE.replace("self.start = start", "self.start = 1 / (start - 1) + start")
    talk = make(
        text
        + """
    def turn_reward(self):
        if self.start > 3:
            os._exit(3)
        return 0.5
"""
    )
    found = talk.run(range(4), n=1)
    assert [each.finish_reason for each in found][1::2] == ["abort", "abort"]
    assert found[0].error is None and found[0].environment_reward == -1.0
    assert "could not be reset" in str(found[1].error) and "ZeroDivisionError" in str(found[1].error)
    assert not found[1].token_ids
    assert "no reward for a turn" in str(found[3].error)
    assert all(turn.reward == 0.5 for turn in found[0].model_turns)


@pytest.mark.parametrize(
    ("history", "use", "refused"),
    [("split", "auto", True), ("split", "always", False), ("append", "auto", False)],
)
def test_string_prompts_cannot_be_templated_again(
    history: str, use: str, refused: bool, files: dict[str, list[str]]
) -> None:
    data, tokenizer = DataConfig(max_prompt_length=900, apply_chat_template=use), chat_tokenizer("smollm2")
    settings = settings_of(tools=files["tools"], history=history)
    with closing(ConversationRunner(settings, data, tokenizer)) as runner:
        rows = Rows.from_list([{"prompt": "Question?", "data_source": "test"}])
        dataset = RLDataset(data, rows, tokenizer, tools=runner.schemas)
        with pytest.raises(DataError) if refused else nullcontext() as raised:
            runner.check_data(dataset)
    if raised is not None:
        assert "the prompt of row 0 of the given rows is a string" in str(raised.value)
        assert "history=split" in str(raised.value) and "data.apply_chat_template=always" in str(raised.value)


def test_an_environment_cannot_add_to_a_prompt_that_is_a_string(world: Talk) -> None:
    text = "<|im_start|>user\nQuestion?<|im_end|>\n<|im_start|>assistant\n"
    conversation = Conversation("u", 0, [1], prompt_messages(text))
    talk: Any = SimpleNamespace(conversation=conversation, episode=SimpleNamespace(row={"prompt": text}))
    with pytest.raises(
        DataError, match="must then be messages that end with the user's; it ends with 'a string'"
    ):
        world.sampler().extend_prompt(talk, "more")


def test_what_the_environment_says_first_must_fit_the_prompt(make: Callable[..., Talk]) -> None:
    talk = make(ALIVE.replace("self.start = start", "self.start = start\n        return 'x' * 2000"))
    (found,) = talk.run([0], n=1)
    assert "the prompt has 2" in str(found.error) and "data.max_prompt_length=1900" in str(found.error)
    assert found.finish_reason == "abort" and not found.token_ids and len(found.prompt_ids) < 1900
