"""The guessing game: the user thinks of a number, the model guesses, the user says whether it is higher or lower."""

import random

FINE_TUNING_STEPS = 150
NUMBERS = range(1, 8)
TURNS = 3
"""As `multi_turn.max_turns` in agent.yaml: enough for a player who halves what is left."""
LISTENS = 0.3
"""Share of the demonstrations in which a guess fits what the user has said so far."""


class Game:
    """The user's side: one instance per conversation."""

    def reset(self, number: int) -> None:
        """Begin; `number` is the column of the data."""
        self.number, self.won = number, False

    def user(self, reply: str) -> str | None:
        """What the user says to a guess; None ends the game."""
        if not reply.isdecimal():
            return "That is no number."
        self.won = int(reply) == self.number
        return None if self.won else "Higher." if int(reply) < self.number else "Lower."

    def turn_reward(self) -> float:
        """Of the guess just made: the prize, or the cost of another turn."""
        return 1.0 if self.won else -0.1


def task(rng: random.Random) -> dict:
    """A row of the training data."""
    question = {"role": "user", "content": f"Guess my number from 1 to {NUMBERS[-1]}."}
    return {"prompt": [question], "number": rng.choice(NUMBERS), "data_source": "guessing"}


def demonstration(task: dict, rng: random.Random) -> list[dict]:
    """A game of a player who guesses at random, among all numbers or among those that are left."""
    game, messages, left, listens = Game(), list(task["prompt"]), list(NUMBERS), rng.random() < LISTENS
    game.reset(task["number"])
    for _ in range(TURNS):
        guess = rng.choice(left if listens else NUMBERS)
        messages.append({"role": "assistant", "content": str(guess)})
        if (said := game.user(str(guess))) is None:
            break
        left = [number for number in left if number != guess and (number > guess) == (said == "Higher.")]
        messages.append({"role": "user", "content": said})
    return messages
