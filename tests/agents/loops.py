"""An agent loop as users write them for verl, and the keys of runs with it."""

from __future__ import annotations

from tests.agents.runs import KEY
from tests.agents.talking import plan_format

plan_format("once", [["ask"], ["ask"], []])
AGENT = "actor_rollout_ref.rollout.agent"
TWO = (f"{KEY}.format=once", f"{KEY}.max_turns=2", f"{KEY}.max_parallel_calls=1")
LOOP = '''
import json
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import ToolParser

ASK = {"type": "function", "function": {"name": "ask"}}


@register("counting")
class Counting(AgentLoopBase):
    """The conversation of `World`."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        self.response_length = rollout.response_length
        self.max_turns = rollout.multi_turn.max_assistant_turns
        self.parser = ToolParser.get_tool_parser(rollout.multi_turn.format, self.tokenizer)

    async def run(self, sampling_params, **kwargs):
        request_id, total = uuid4().hex, kwargs["start"]
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages, tools=[ASK], add_generation_prompt=True, tokenize=True
            ),
        )
        ids, mask, log_probs = list(prompt_ids), [], []
        for turn in range(self.max_turns):
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
            )
            ids = ids + output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            _, calls = await self.parser.extract_tool_calls(output.token_ids)
            ended = ids[-1] == self.tokenizer.eos_token_id
            if ended and calls:
                total += len(json.loads(calls[0].arguments)["text"])
            if not ended or not calls or turn + 1 == self.max_turns:
                break
            answer = "now " + "abcdefgh"[total % 8]
            answer = f"user : <tool_response>\\n{answer}\\n</tool_response> <end> assistant :"
            added = self.tokenizer.encode(answer, add_special_tokens=False)
            if len(mask) + len(added) >= self.response_length:
                break
            ids = ids + added
            mask += [0] * len(added)
            log_probs += [0.0] * len(added)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[len(prompt_ids):],
            response_mask=mask,
            response_logprobs=log_probs,
            reward_score=float(total % 5),
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=0.5, tool_calls=0.25),
        )
'''
