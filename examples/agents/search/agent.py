"""The search agent: documents, a tool that searches them, a reward, questions, conversations to imitate at first."""

import random

FINE_TUNING_STEPS = 300
RIGHT, VAGUE = 0.25, 0.15
"""Shares of the demonstrations that search for the room, and with words that fit all of them; the others guess."""
FIRST = ["Ada", "Ben", "Eva", "Ian", "Kim", "Leo", "Mia", "Tom"]
LAST = ["Berg", "Cole", "Diaz", "Hart", "Lind", "Moss", "Reed", "Vale"]
_rng = random.Random("documents")
GUESTS = {str(room): f"{_rng.choice(FIRST)} {_rng.choice(LAST)}" for room in range(100, 1000)}
DOCUMENTS = [f"The guest of room {room} is {guest}" for room, guest in GUESTS.items()]


def search(query: str) -> str:
    """Find the document that shares most words with a query.

    Args:
        query: What to look for.
    """
    shared = [len({*document.split()} & {*query.split()}) for document in DOCUMENTS]
    best = [document for document, count in zip(DOCUMENTS, shared, strict=True) if count == max(shared)]
    return best[0] if len(best) == 1 else f"{len(best)} documents"


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 when the model's last words are the name of the guest."""
    return float(solution_str.endswith(f" {ground_truth}."))


def task(rng: random.Random) -> dict:
    """A row of the training data."""
    room = rng.choice(list(GUESTS))
    return {
        "prompt": [{"role": "user", "content": f"Who is in room {room}?"}],
        "ground_truth": GUESTS[room],
        "data_source": "search",
    }


def demonstration(task: dict, rng: random.Random) -> list[dict]:
    """A conversation about a task; its answer is a guess unless the right document was found."""
    messages = [{"role": "system", "content": "Tools: search"}, *task["prompt"]]  # as the template has them
    kind, answer = rng.random(), f"I guess {rng.choice(FIRST)} {rng.choice(LAST)}."
    if kind < RIGHT + VAGUE:
        room = task["prompt"][0]["content"].rstrip("?").split()[-1]
        query = f"room {room}" if kind < RIGHT else "guest in room"
        call = {"function": {"name": "search", "arguments": {"query": query}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": search(query)})
        answer = f"It is {task['ground_truth']}." if kind < RIGHT else answer
    return [*messages, {"role": "assistant", "content": answer}]
