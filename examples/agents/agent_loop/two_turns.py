"""The calculator as an agent loop with verl's names: the model may call `multiply` once, and then answers."""

import json
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class TwoTurns(AgentLoopBase):
    def __init__(self, *args, tool_call_format="hermes", **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        self.parser = ToolParser.get_tool_parser(tool_call_format, self.tokenizer)

    async def run(self, sampling_params, **kwargs):
        request_id, messages = uuid4().hex, list(kwargs["raw_prompt"])
        prompt_ids = self.tokenizer.apply_chat_template(
            messages, tools=[MULTIPLY], add_generation_prompt=True, tokenize=True
        )
        response_ids, mask = [], []
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
            )
            response_ids += output.token_ids
            mask += [1] * len(output.token_ids)
            _, calls = await self.parser.extract_tool_calls(output.token_ids)
            if turn or not calls:
                break
            # Only the tool's text is tokenised; what the model drew stays as it is.
            text = f"<|user|><tool_response>{multiply(calls[0])}</tool_response><|end|><|assistant|>"
            added = self.tokenizer.encode(text, add_special_tokens=False)
            if len(response_ids) + len(added) >= self.response_length:
                break
            response_ids += added
            mask += [0] * len(added)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=response_ids, response_mask=mask, num_turns=2 * turn + 2
        )


def multiply(call):
    try:
        arguments = json.loads(call.arguments)
        return str(int(arguments["a"]) * int(arguments["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error!r}"
