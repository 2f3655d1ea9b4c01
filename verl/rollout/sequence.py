"""One sample in the engine: its tokens, how many of them are in the KV cache, in which blocks, and where it ends.

`computed` tokens have their keys and values in the cache; the model has to see the other `remaining`, and after the
last of them it draws one more. A running sequence has one remaining token; so may a prompt that was cut before its last
token, which is why `Status` tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import FinishReason, Request, Response, SamplingParams
from verl.rollout.sampling import sequence_key

_STOP_TAIL = 8
"""Tokens decoded beyond the bytes of a stop string, for tokens that decode to nothing by themselves."""


def eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every token that ends a sequence: the model's generation config and the tokenizer's end token."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, (list, tuple)):
            found.update(int(item) for item in value)
    return frozenset(found)


def check_finite(log_probs: Seq[float]) -> None:
    """Broken weights give NaN; drawing from that would go unnoticed."""
    if not all(map(math.isfinite, log_probs)):
        raise RolloutError(
            "the logits are NaN or infinite: broken weights, or an overflow in this dtype (check the last update's "
            "gradient norm and rollout.dtype)"
        )


class Stopper:
    """Finds where a response ends: at a stop token, at a stop string, or at `max_tokens`."""

    def __init__(self, tokenizer: Any | None, eos_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        # Stop strings are searched in the raw text: cleaning moves spaces that later tokens follow, so that the answer
        # would depend on how many tokens are decoded at once.
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._decoding = {"clean_up_tokenization_spaces": False} if cleans else {}

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        ids = frozenset(sampling.stop_token_ids)
        return ids if sampling.ignore_eos else ids | self.eos_ids

    def end(
        self, token_ids: Seq[int], start: int, sampling: SamplingParams, prompt_length: int = 0
    ) -> tuple[int, FinishReason] | None:
        """Where, among `token_ids[start:]`, the response `token_ids[prompt_length:]` ends and why; None if nowhere.

        The tokens before `start` are known not to end it. (3, "stop") means that the first 3 of `token_ids` stay.
        The work is linear in the new tokens, however long the response is.
        """
        longest = prompt_length + sampling.max_tokens
        limit = min(len(token_ids), longest)
        ids, eos = sampling.stop_token_ids, () if sampling.ignore_eos else self.eos_ids
        new = range(start, limit)
        stopped = next((at + 1 for at in new if token_ids[at] in ids or token_ids[at] in eos), None)
        if sampling.stop and self.tokenizer is not None:
            found = self._stop_string(token_ids, start, stopped or limit, sampling, prompt_length)
            if found is not None:
                return found, "stop"
        if stopped is not None:
            return stopped, "stop"
        return (limit, "length") if limit == longest else None

    def _stop_string(
        self, token_ids: Seq[int], start: int, limit: int, sampling: SamplingParams, prompt_length: int
    ) -> int | None:
        """The first count above `start`, at most `limit`, of tokens whose newest ones contain a stop string.

        All new tokens are decoded at once; only where that finds a stop string are they decoded one by one, to find
        the token that completes it."""
        # Bytes, not characters: byte-level tokenizers may use a token for each byte of a character.
        tail = max(len(text.encode()) for text in sampling.stop) + _STOP_TAIL

        def contains(first: int, count: int) -> bool:
            ids = list(token_ids[max(prompt_length, first) : count])
            text = self.tokenizer.decode(ids, skip_special_tokens=False, **self._decoding)  # type: ignore[union-attr]
            return any(stop in text for stop in sampling.stop)

        if start >= limit or not contains(start + 1 - tail, limit):
            return None
        return next((count for count in range(start + 1, limit + 1) if contains(count - tail, count)), None)


class Status(Enum):
    WAITING = "waiting"
    PROMPT = "prompt"
    """Its prompt is being computed, or is and its samples wait for rows."""
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """`table` lists the cache blocks of its first tokens; `chain` the content ids of its full hash blocks."""

    def __init__(self, request: Request, sample: int, version: int) -> None:
        partial = request.partial[sample] if request.partial else ()
        self.request = request
        self.sample = sample
        self.first_version = version
        """Of the weights that drew the first token."""
        self.version_changes: list[tuple[int, int]] = []
        """As `Response` has them."""
        self.key = sequence_key(request.seed, request.draw_key, sample)
        self.tokens = [*request.prompt_ids, *partial]
        self.log_probs: list[float] = []
        self.prompt_length = len(request.prompt_ids)
        self.resumed_length = len(self.tokens)
        self.max_length = self.prompt_length + request.sampling.max_tokens
        self.computed = 0
        self.writable = 0
        """Up to this length its blocks are its own to write to, as far as the scheduler knows."""
        self.slot = -1
        """Where a device keeps its new tokens, while it is a row there."""
        self.prompt_state: Any = None
        """What the runner keeps of its computed prompt, the last hidden state, while samples of it wait."""
        self.on_device = 0
        """Tokens generated on the device and not yet copied to the host; none of those on the host ends it."""
        self.stale = False
        """Some of its cached keys and values come from earlier weights: no other sequence may use them."""
        self.table: list[int] = []
        self.chain: list[int] = []
        self.siblings: list[Sequence] = []
        """Samples of the same prompt that start from this one's blocks once its prompt is computed."""
        self.status = Status.WAITING

    @property
    def length(self) -> int:
        return len(self.tokens) + self.on_device

    @property
    def remaining(self) -> int:
        return self.length - self.computed

    @property
    def produced(self) -> int:
        """Tokens after the prompt, resumed ones included: the position that keys the next draw."""
        return self.length - self.prompt_length

    def extend(
        self, token_ids: Iterable[int], log_probs: Iterable[float], stopper: Stopper, only_last: bool = False
    ) -> FinishReason | None:
        """Add drawn tokens up to the first that ends it; why that one does, or None. `only_last`: apart from stop
        strings, no token before the last can end it."""
        start, sampling = len(self.tokens), self.request.sampling
        self.tokens += token_ids
        self.log_probs += log_probs
        if only_last and not sampling.stop:
            start = max(len(self.tokens) - 1, start)
        end = stopper.end(self.tokens, start, sampling, self.prompt_length)
        if end is None:
            return None
        count, reason = end
        beyond = len(self.tokens) - count
        del self.tokens[count:], self.log_probs[len(self.log_probs) - beyond :]
        return reason

    def set_version(self, version: int) -> None:
        """Its next token is drawn by this version of the weights."""
        drawn, changes = self.length - self.resumed_length, self.version_changes
        if changes and changes[-1][0] == drawn:
            changes.pop()  # that version drew nothing
        if drawn == 0:
            self.first_version = version
        elif version != (changes[-1][1] if changes else self.first_version):
            changes.append((drawn, version))

    def response(self, reason: FinishReason) -> Response:
        token_ids = self.tokens[self.resumed_length :]
        return Response(
            self.request.request_id,
            self.sample,
            token_ids,
            list(self.log_probs),
            reason,
            self.first_version,
            [(at, version) for at, version in self.version_changes if at < len(token_ids)],
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}/{self.sample}, {self.status.value}, "
            f"{self.computed} of {self.length} computed)"
        )


def sequences_of(request: Request, version: int = 0) -> list[Sequence]:
    """The sequences to queue for a request: a leader carrying its siblings, or all samples when resumed
    (their partial tokens differ, so that they share blocks only as far as the prompt goes)."""
    samples = [Sequence(request, index, version) for index in range(request.n)]
    if request.partial:
        return samples
    samples[0].siblings = samples[1:]
    return samples[:1]
