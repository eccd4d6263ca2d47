"""What the demo model says when it is not asked about a picture: greetings, thanks, and everything out of scope.

Owns the fixed sentences and the generator of out-of-scope questions; pure Python, deterministic by the given
`random.Random`. Knows nothing of scenes, tokens or tensors.
"""

import random

from demo.talk_phrasings import (
    BYES,
    FIXED,
    GREETINGS,
    PEOPLE,
    PLACES,
    TEMPLATES,
    THANKS,
    THINGS,
    TOPICS,
    WHO_ARE_YOU,
)

HELLO = "Hello! Show me a picture of simple shapes and ask me about it."
WELCOME = "You are welcome!"
WHO = "I am the Tandem demo model. I answer questions about pictures of simple shapes."
GOODBYE = "Goodbye!"
SCOPE = "I can only answer questions about simple shapes in pictures and short videos."
NO_PICTURE = "I see no picture. Please send one with simple shapes."

LETTERS = "etaoinshrdlucmfwypvbgkqjxz"


def gibberish(rng: random.Random) -> str:
    """Words that no training text spells out, so that unknown text means out of scope."""
    words = ["".join(rng.choices(LETTERS, range(30, 4, -1), k=rng.randint(2, 9))) for _ in range(rng.randint(2, 8))]
    lead = rng.choice(("", "", "what is ", "tell me about ", "how do i ", "who is ", "can you ", "why do ", "when "))
    return lead + " ".join(words)


def out_of_scope(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.15:
        return gibberish(rng)
    if style < 0.45:
        return rng.choice(FIXED)
    return rng.choice(TEMPLATES).format(
        place=rng.choice(PLACES),
        place2=rng.choice(PLACES),
        topic=rng.choice(TOPICS),
        person=rng.choice(PEOPLE),
        thing=rng.choice(THINGS),
        a=rng.randint(1, rng.choice((12, 99, 999))),
        b=rng.randint(1, rng.choice((12, 99))),
    )


def small_talk(rng: random.Random) -> tuple[str, str, str]:
    """(kind, question, answer) of a message that needs no picture."""
    style = rng.random()
    if style < 0.14:
        kind, question, answer = "hello", rng.choice(GREETINGS), HELLO
    elif style < 0.22:
        kind, question, answer = "thanks", rng.choice(THANKS), WELCOME
    elif style < 0.36:
        kind, question, answer = "who", rng.choice(WHO_ARE_YOU), WHO
    elif style < 0.4:
        kind, question, answer = "bye", rng.choice(BYES), GOODBYE
    else:
        kind, question, answer = "scope", out_of_scope(rng), SCOPE
    return kind, dress(rng, question), answer


def dress(rng: random.Random, text: str) -> str:
    """Capital letter and closing mark, or neither, as people type."""
    if rng.random() < 0.65:
        text = text[0].upper() + text[1:]
    if text[-1].isalnum() and rng.random() < 0.6:
        is_question = text.split()[0].lower() in {
            "what",
            "who",
            "how",
            "where",
            "when",
            "why",
            "is",
            "are",
            "can",
            "do",
        }
        text += "?" if is_question else rng.choice((".", "!", ""))
    return text
