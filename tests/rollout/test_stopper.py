"""Where responses end: the search over many new tokens at once equals the check after every token, in linear work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout import Request, SamplingParams
from verl.rollout.external_engine import Sample
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.sequence import Stopper

PIECES = [
    "a",
    "b",
    "ab",
    "ba",
    "",
    " ",
    "\n",
    b"\xc3",
    b"\xa9",
    b"\xe4\xbd",
    b"\xa0",
    "é",
    "END",
    "</",
    "s>",
    "E",
    "N",
]
"""Text of tokens 0 to 16: some split a stop string, some hold part of a character, one is silent."""
EOS = len(PIECES)


class Bytes:
    """A byte-level tokenizer, counting the tokens it decodes."""

    eos_token_id = EOS

    def __init__(self) -> None:
        self.decoded = self.calls = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(ids)
        self.calls += 1
        pieces = [PIECES[token] if token < EOS else "<eos>" for token in ids]
        raw = b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
        return raw.decode(errors="replace")


def end_token_by_token(ids: list[int], start: int, sampling: SamplingParams, prompt_length: int) -> Any:
    """The definition: after every token, is it a stop token, does the newest text hold a stop string, is it the last"""
    for count in range(start + 1, len(ids) + 1):
        last = ids[count - 1]
        if last in sampling.stop_token_ids or (last == EOS and not sampling.ignore_eos):
            return count, "stop"
        if sampling.stop:
            tail = max(len(text.encode()) for text in sampling.stop) + 8
            text = Bytes().decode(ids[max(prompt_length, count - tail) : count])
            if any(stop in text for stop in sampling.stop):
                return count, "stop"
        if count - prompt_length >= sampling.max_tokens:
            return count, "length"
    return None


@pytest.mark.slow(seconds=3)
@settings(max_examples=400)
@given(
    prompt=st.lists(st.integers(0, EOS), max_size=6),
    response=st.lists(st.integers(0, EOS), min_size=1, max_size=60),
    polls=st.lists(st.integers(1, 9), min_size=60, max_size=60),
    stop=st.lists(st.sampled_from(["ab", "aba", "END", "</s>", "é", "你", "b\n", " a", "<eos>"]), max_size=3),
    stop_token_ids=st.lists(st.integers(0, EOS), max_size=1),
    ignore_eos=st.booleans(),
    longest=st.integers(1, 70),
)
def test_a_poll_of_many_tokens_ends_where_checking_each_would(
    prompt: list[int],
    response: list[int],
    polls: list[int],
    stop: list[str],
    stop_token_ids: list[int],
    ignore_eos: bool,
    longest: int,
) -> None:
    sampling = SamplingParams(
        max_tokens=longest, stop=tuple(stop), stop_token_ids=tuple(stop_token_ids), ignore_eos=ignore_eos
    )
    stopper = Stopper(Bytes(), frozenset({EOS}))
    ids, first = [*prompt, *response], len(prompt)
    wanted = end_token_by_token(ids, first, sampling, first)
    assert stopper.end(ids, first, sampling, first) == wanted
    known, found = first, None
    for count in polls:  # however the tokens arrive
        new = min(known + count, len(ids))
        found = stopper.end(ids[:new], known, sampling, first)
        known = new
        if found is not None or known == len(ids):
            break
    assert found == wanted


@pytest.mark.parametrize("poll", [1, 4, 100])
@pytest.mark.parametrize("stop", ["Final answer:", "最终答案如下：", "Ответ готов, конец", "🎉🎉🎉", "ผู้ใช้:"])
def test_a_stop_string_is_found_where_every_byte_is_a_token(stop: str, poll: int) -> None:
    class EachByte:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return bytes(ids).decode(errors="replace")

    stopper, sampling = Stopper(EachByte(), frozenset()), SamplingParams(max_tokens=500, stop=(stop,))
    ids = list(f"so it is: {stop} and more".encode())
    found = (stopper.end(ids[: at + poll], at, sampling) for at in range(0, len(ids), poll))
    assert next(filter(None, found), None) == (len(f"so it is: {stop}".encode()), "stop")


def test_a_tokenizer_that_cleans_spaces_is_read_without_that() -> None:
    """Cleaning would take a space away once a full stop follows, so that a poll of two tokens missed the string."""

    class Cleaning(Bytes):
        clean_up_tokenization_spaces = True

        def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = True, **_: Any) -> str:
            text = super().decode(ids)
            return text.replace(" \n", "\n") if clean_up_tokenization_spaces else text

    stopper = Stopper(Cleaning(), frozenset())
    space, newline = PIECES.index(" "), PIECES.index("\n")
    sampling = SamplingParams(max_tokens=9, stop=("a ",))
    assert stopper.end([0, space, newline, 1], 0, sampling) == (2, "stop")


def decoded_for(length: int, poll: int) -> Bytes:
    tokenizer = Bytes()
    stopper = Stopper(tokenizer, frozenset({EOS}))
    sampling = SamplingParams(max_tokens=length + 1, stop=("never said",))
    ids = [index % 4 for index in range(length)]
    for start in range(0, length, poll):
        assert stopper.end(ids[: start + poll], start, sampling) is None
    return tokenizer


@pytest.mark.parametrize("poll", [1, 4])
def test_decoding_for_stop_strings_is_linear_in_the_response(poll: int) -> None:
    short, long = decoded_for(200, poll), decoded_for(800, poll)
    assert (short.calls, long.calls) == (200 // poll, 800 // poll), "one decode for each poll"
    window = len("never said") + 8 + poll
    assert long.decoded < 800 // poll * window
    assert long.decoded < 4.2 * short.decoded


class CountingList(list):
    """A list that counts the elements copied out of it."""

    copied = 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            type(self).copied += len(range(*index.indices(len(self))))
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        type(self).copied += len(self)
        return super().__iter__()


@pytest.mark.parametrize("partial", [(), ([1, 2, 3],)])
def test_a_copying_engine_takes_tokens_without_copying_the_response(partial: Any) -> None:
    stopper = Stopper(None, frozenset({7}))
    sample = Sample(Request("a", [5], SamplingParams(max_tokens=600), partial=partial), 0)
    sample.tokens = CountingList(sample.tokens)
    CountingList.copied = 0
    for _ in range(500):
        assert sample.append([5], [-1.0], stopper) is None
    assert CountingList.copied == 0
    assert sample.append([5, 6, 7, 8, 9], [-1.0, -2.0, -3.0, -4.0, -5.0], stopper) == "stop"
    response = sample.response("stop")
    assert response.token_ids == [5] * 501 + [6, 7]
    assert response.log_probs == [-1.0] * 501 + [-2.0, -3.0]


def test_resumed_tokens_count_for_length_and_stop_strings() -> None:
    stopper = Stopper(Bytes(), frozenset({EOS}))
    end = PIECES.index("E"), PIECES.index("N")
    stopped = SamplingParams(max_tokens=9, stop=("Eab",))
    sample = Sample(Request("a", [0], stopped, partial=([end[1], end[0]],)), 0)
    assert sample.append([0, 1, 1], [-1.0, -1.0, -1.0], stopper) == "stop"
    assert sample.response("stop").token_ids == [0, 1]
    sample = Sample(Request("a", [0], SamplingParams(max_tokens=3), partial=([4, 4],)), 0)
    assert sample.append([0, 1], [-1.0, -1.0], stopper) == "length"
    assert sample.response("length").token_ids == [0]


@pytest.mark.parametrize("length", [40, 120])
def test_the_device_path_fetches_each_token_once(length: int, tiny: Any) -> None:
    """Rows with stop strings are read at every poll: only what is new since the last one."""
    from verl.rollout.native.device_state import DeviceState

    fetched: list[int] = []
    fetch = DeviceState.fetch

    def counting(self: DeviceState, slots: Any, starts: Any, counts: list[int]) -> Any:
        fetched.extend(counts)
        return fetch(self, slots, starts, counts)

    class Words:
        eos_token_id = 2

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(f"w{token} " for token in ids)

    sampling = SamplingParams(max_tokens=length, stop=("never",), ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceState, "fetch", counting)
        engine = NativeRollout(tiny("llama"), Words(), Limits(), on_device=True, verify=False)
        (response,) = engine.generate([Request("a", [5, 6], sampling)])
    assert len(response.token_ids) == length
    assert sum(fetched) == length and len(fetched) > 2


class Letters:
    """Token 0 is "a", 1 is "b" and so on; the last one decodes to nothing."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in ids if token < 25)


LETTERS_END = 25
LETTERS_STOPPER = Stopper(Letters(), frozenset({LETTERS_END}))


def reason(token_ids: list[int], sampling: SamplingParams, prompt_length: int = 0) -> str | None:
    """Why a response ends at its newest token."""
    end = LETTERS_STOPPER.end(token_ids, len(token_ids) - 1, sampling, prompt_length)
    assert end is None or end[0] == len(token_ids)
    return end[1] if end else None


def test_an_end_at_the_very_limit_is_an_end() -> None:
    """A response that says all it has to say is not cut off, however long it is."""
    sampling = SamplingParams(max_tokens=3)
    assert reason([9, 9, 1, 2, LETTERS_END], sampling, prompt_length=2) == "stop"
    assert reason([9, 9, 1, 2, 3], sampling, prompt_length=2) == "length"
    assert reason([9, 9, 1, 2], sampling, prompt_length=2) is None
    told = SamplingParams(max_tokens=3, stop=("cd",), stop_token_ids=(7,))
    assert reason([1, 2, 3], told) == "stop"
    assert reason([1, 2, 7], told) == "stop"


def test_a_stop_string_is_looked_for_in_the_response_alone() -> None:
    sampling = SamplingParams(max_tokens=9, stop=("ab",))
    assert reason([0, 1, 4], sampling, prompt_length=2) is None
    assert reason([0, 1], sampling, prompt_length=1) is None, "half of it belongs to the prompt"
    assert reason([4, 0, 1], sampling, prompt_length=1) == "stop"


def test_a_stop_string_may_be_many_tokens_some_of_them_silent() -> None:
    text = "abcdefghij"
    sampling = SamplingParams(max_tokens=99, stop=("zz", text), ignore_eos=True)
    ids = [20] * 30
    for token in range(9):
        ids += [token, LETTERS_END] if token % 2 else [token]
        assert reason(ids, sampling) is None
    assert reason([*ids, 9], sampling) == "stop"


def test_ignoring_the_end_token_ignores_no_other() -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(4,), ignore_eos=True)
    assert reason([1, LETTERS_END], sampling) is None and reason([1, 4], sampling) == "stop"
    assert LETTERS_STOPPER.stop_ids(sampling) == {4}
    assert LETTERS_STOPPER.stop_ids(SamplingParams(stop_token_ids=(4,))) == {4, LETTERS_END}
