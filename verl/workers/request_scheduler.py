"""One `generate` dealt out to several engines: who has which requests, what changes hands, what was called off.

Everything is dealt out evenly at the start: an engine fills its places from its own queue, so that it is not left half
empty by the longest responses of a piece while others wait. A process that is through takes from another what that one
has not begun. How many an engine runs at once says which those are; where the guess was wrong, and an engine had begun,
what it has made goes along and is gone on with, which gives the same tokens.

Plain Python: nothing here knows how requests travel.

What always holds: every sample is handed to the caller exactly once, whole, whoever generated its parts; what is called
off is never dealt out again.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from verl.errors import RolloutError
from verl.rollout.base import FinishReason, Request, Response
from verl.workers.generating import CalledOff

_numbers = itertools.count()


@dataclass
class Part:
    """What one process has now: requests in the order its engine begins them."""

    number: int
    requests: dict[str, Request]
    left: Counter[str]
    """Samples that have not come back, by request."""
    finished: int = 0
    """Samples that left a place in the engine to others."""

    def untouched(self, at_once: int, moving: Collection[str]) -> list[str]:
        """Requests the engine cannot have begun, if it runs `at_once` samples and begins them in order."""
        names, before = [], 0
        for name, request in self.requests.items():
            if before >= at_once + self.finished and self.left[name] == request.n and name not in moving:
                names.append(name)
            before += request.n
        return names


@dataclass
class Move:
    """Requests on their way back from a process; they are dealt out again together."""

    awaited: set[str]
    returned: list[Request] = field(default_factory=list)


class RequestScheduler:
    """Touched by whoever reads the responses and by whoever calls something off, maybe at once."""

    def __init__(self, requests: list[Request], processes: int, at_once: int, version: int) -> None:
        self._at_once, self._version = at_once, version
        self._lock = threading.Lock()
        self._off = CalledOff()
        size, larger = divmod(len(requests), processes)
        ends = list(itertools.accumulate(size + (rank < larger) for rank in range(processes)))
        self._waiting = deque(requests[a:b] for a, b in zip([0, *ends], ends, strict=False) if a < b)
        self._asked = {request.request_id: request for request in requests}
        if len(self._asked) != len(requests):
            name = next(name for name, times in Counter(r.request_id for r in requests).items() if times > 1)
            raise RolloutError(f"request {name!r} was given twice; request ids key the draws and must differ")
        self._set_aside: list[Request] = []
        self._parts: dict[int, Part] = {}
        self._moves: list[Move] = []
        self._made: dict[tuple[str, int], Response] = {}
        """What there is of samples that changed hands: the tokens of all processes so far."""
        self._given: set[tuple[str, int]] = set()

    # -- dealing ------------------------------------------------------------------------------------------------

    def next_part(self, rank: int) -> Part | None:
        """What a free process takes; None when nothing waits that is still wanted."""
        with self._lock:
            while self._waiting:
                wanted = self._still_wanted(self._waiting.popleft())
                if wanted:
                    # Engines begin short prompts first; sorted already, their order is ours.
                    wanted.sort(key=lambda request: len(request.prompt_ids))
                    left = Counter({request.request_id: request.n for request in wanted})
                    part = Part(next(_numbers), {r.request_id: r for r in wanted}, left)
                    self._parts[rank] = part
                    return part
            return None

    def _still_wanted(self, piece: list[Request]) -> list[Request]:
        self._set_aside += [request for request in piece if request.request_id in self._off]
        return [request for request in piece if request.request_id not in self._off]

    def steal(self, idle: int) -> tuple[int, list[str]] | None:
        """For one of `idle` processes with nothing to do: the process to take from, and half of what it has not begun.
        None when there is nothing, or when enough is on its way."""
        with self._lock:
            if len(self._moves) >= idle or self._waiting:
                return None
            moving = {name for move in self._moves for name in move.awaited}
            untouched = {rank: part.untouched(self._at_once, moving) for rank, part in self._parts.items()}
            rank = max(untouched, key=lambda rank: len(untouched[rank]), default=None)
            if rank is None or not untouched[rank]:
                return None
            names = untouched[rank][len(untouched[rank]) // 2 :]
            self._moves.append(Move(set(names)))
            return rank, names

    def numbers(self) -> dict[int, int]:
        """The number of each process's part."""
        with self._lock:
            return {rank: part.number for rank, part in self._parts.items()}

    def done(self, rank: int) -> None:
        """A process is through with its part."""
        with self._lock:
            del self._parts[rank]

    # -- answers ------------------------------------------------------------------------------------------------

    def answered(self, rank: int, responses: Sequence[Response]) -> list[Response]:
        """Those that are for the caller."""
        with self._lock:
            part = self._parts[rank]
            found = [whole for response in responses for whole in self._take(part, response)]
        return found

    def _take(self, part: Part, response: Response) -> list[Response]:
        name, key = response.request_id, (response.request_id, response.sample)
        part.left[name] -= 1
        part.finished += response.finish_reason != "abort" or bool(response.token_ids)
        move = next((move for move in self._moves if name in move.awaited), None)
        whole = self._joined(key, response)
        again = move is not None and response.finish_reason == "abort" and name not in self._off
        found = []
        if again:
            if whole.token_ids and key not in self._given:
                self._made[key] = whole
        elif key not in self._given:
            self._given.add(key)
            found.append(whole)
            if move is not None:
                self._made[key] = whole
        if move is not None and part.left[name] == 0:
            self._came_back(move, name)
        return found

    def _joined(self, key: tuple[str, int], response: Response) -> Response:
        before = self._made.get(key)
        if before is None:
            return response
        return replace(
            response,
            token_ids=[*before.token_ids, *response.token_ids],
            log_probs=[*before.log_probs, *response.log_probs],
        )

    def _came_back(self, move: Move, name: str) -> None:
        move.awaited.discard(name)
        request = self._asked[name]
        if not all((name, sample) in self._given for sample in range(request.n)):
            move.returned.append(self._with_what_there_is(request))
        if not move.awaited:
            self._moves.remove(move)
            if move.returned:
                self._waiting.append(move.returned)

    def _with_what_there_is(self, request: Request) -> Request:
        """To be gone on with. A sample that is finished is asked for its last token again: a request has all of its
        samples or none, and this one's second answer is dropped."""
        parts = []
        for sample in range(request.n):
            key = (request.request_id, sample)
            made = self._made[key].token_ids if key in self._made else []
            before = request.partial[sample] if request.partial else ()
            parts.append([*before, *(made[:-1] if key in self._given else made)])
        return replace(request, partial=tuple(parts)) if any(parts) else request

    # -- calling off --------------------------------------------------------------------------------------------

    def cancel(self, request_ids: Collection[str] | None) -> None:
        with self._lock:
            self._off.add(request_ids)

    def unwanted(self) -> list[Response]:
        """The answers to what waits and was called off, with what had been made of it."""
        with self._lock:
            if self._off:
                kept = (self._still_wanted(piece) for piece in self._waiting)
                self._waiting = deque(piece for piece in kept if piece)
            requests, self._set_aside = self._set_aside, []
            return [response for request in requests for response in self._stopped(request)]

    def _stopped(self, request: Request) -> list[Response]:
        reason: FinishReason = "abort"
        found = []
        for sample in range(request.n):
            key = (request.request_id, sample)
            if key not in self._given:
                self._given.add(key)
                nothing = Response(request.request_id, sample, [], [], reason, self._version)
                found.append(self._joined(key, nothing))
        return found
