"""The guessing game as an agent that somebody has already: OpenAI's client in a loop, and nothing of verl."""

import openai


def play(row: dict) -> float:
    """One game; the address and the key of the model are in the environment. Returns the reward."""
    client, messages = openai.OpenAI(), list(row["prompt"])
    for turn in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages)
        guess = (answer.choices[0].message.content or "").strip()
        messages.append(answer.choices[0].message)
        if guess == str(row["number"]):
            return 1.0 - 0.1 * turn
        hint = "That is no number."
        if guess.isdecimal():
            hint = "Higher." if int(guess) < row["number"] else "Lower."
        messages.append({"role": "user", "content": hint})
    return -0.3
