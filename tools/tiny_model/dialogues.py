"""Chats: one to six exchanges of every kind, typed as people type, some with a system message or with something to remember."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiny_model.grammar import Exchange, capitalise, pick
from tiny_model.lexicon import CLASSES
from tiny_model.poems import poem_request
from tiny_model.questions import question
from tiny_model.refusals import refusal
from tiny_model.small_talk import feeling, small_talk
from tiny_model.stories import story_request


@dataclass(frozen=True)
class Message:
    """One message of a chat: its role ("system", "user" or "assistant") and its text."""

    role: str
    content: str


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small language model inside rustvllm.",
    "You are a helpful, honest assistant.",
    "You are a kind teacher.",
    "Answer briefly and politely.",
    "Be kind and clear.",
    "You help people with simple questions.",
    "You are an AI assistant. Answer in simple words.",
    "Speak simply.",
)


def memory(rng: random.Random) -> list[Exchange]:
    """The user says something about themselves and asks for it later."""
    slots = {
        "n": rng.choice(CLASSES["name"]),
        "c": rng.choice(CLASSES["colour"]),
        "job": rng.choice(CLASSES["job"]),
        "pet": rng.choice(CLASSES["beast"]),
        "pn": rng.choice(CLASSES["pet"]),
    }
    form = rng.randrange(3)
    if form == 0:
        tell = (
            pick(
                rng,
                (
                    "my name is $n",
                    "hello, my name is $n",
                    "hi, I am $n",
                    "I am $n{, and I am a^ $job|}",
                    "you can call me $n",
                    "hello, I'm $n",
                    "hi! my name is $n. who are you",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "{hello|hi|nice to meet you}, $n! {how can I help you|what can I do for you|how are you today}?",
                    "it is nice to meet you, $n.",
                    "hello $n! I am the small model inside rustvllm.",
                ),
                slots,
            ),
        )
        ask = (
            pick(
                rng,
                ("what is my name", "do you remember my name", "who am I", "what's my name", "can you say my name"),
                slots,
            ),
            pick(rng, ("your name is $n.", "you are $n.", "you told me that your name is $n."), slots),
        )
    elif form == 1:
        tell = (
            pick(rng, ("my favourite colour is $c", "I like the colour $c best", "$c is my favourite colour"), slots),
            pick(
                rng,
                (
                    "$c is a {beautiful|nice|good} colour.",
                    "$c is lovely. many flowers are $c.",
                    "I will remember that: $c.",
                ),
                slots,
            ),
        )
        ask = (
            pick(
                rng,
                ("what is my favourite colour", "which colour do I like", "do you remember my favourite colour"),
                slots,
            ),
            pick(rng, ("your favourite colour is $c.", "you like $c best.", "it is $c."), slots),
        )
    else:
        tell = (
            pick(rng, ("I have a^ $pet named $pn", "my $pet is called $pn", "this is my $pet $pn"), slots),
            pick(
                rng,
                ("$pn is a nice name for a^ $pet.", "how nice! I hope $pn is well.", "say hello to $pn from me."),
                slots,
            ),
        )
        ask = (
            pick(
                rng,
                ("what is the name of my $pet", "how is my $pet called", "do you remember the name of my $pet"),
                slots,
            ),
            pick(rng, ("your $pet is called $pn.", "its name is $pn.", "the name of your $pet is $pn."), slots),
        )
    between = [small_talk(rng) if rng.random() < 0.4 else question(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    return [tell, *between, ask] if rng.random() < 0.75 else [tell, *between]


_PREFIXES = ("", "", "", "", "", "", "", "", "please ", "hello, ", "hi, ", "hey, ", "now ", "so, ", "well, ")

_ASKING = (
    "what",
    "who",
    "where",
    "why",
    "how",
    "which",
    "is ",
    "are ",
    "do ",
    "can ",
    "of which",
    "on which",
    "in which",
    "when",
    "have ",
    "will ",
    "am ",
    "did ",
    "could ",
)


def as_typed(rng: random.Random, ask: str) -> str:
    """Write a request as people type it: with or without its mark, capital letter, or a word of greeting."""
    prefix = rng.choice(_PREFIXES)
    lowered = ask.lower()
    asking = (
        lowered.startswith(_ASKING)
        or ". how many" in lowered
        or ". what" in lowered
        or ": wh" in lowered
        or lowered.endswith("who are you")
    )
    if (prefix == "please " and (asking or lowered.startswith(("i ", "my ", "please", "hello", "hi", "you")))) or (
        prefix and ("\n" in ask or len(ask) < 16)
    ):
        prefix = ""
    text = prefix + (ask[0].lower() + ask[1:] if prefix and not ask.startswith(("I ", "I'")) else ask)
    mark = "?" if asking else rng.choice((".", "", "!" if len(ask) < 20 else "."))
    if rng.random() < 0.15:
        mark = ""
    text = text if text.endswith(("?", "!", ".")) else text + mark
    return text.lower() if rng.random() < 0.08 else capitalise(text)


def exchange(rng: random.Random) -> Exchange:
    """Draw one request and its answer."""
    roll = rng.random()
    if roll < 0.56:
        return question(rng)
    if roll < 0.66:
        return story_request(rng)
    if roll < 0.70:
        return poem_request(rng)
    if roll < 0.80:
        return refusal(rng)
    if roll < 0.88:
        return feeling(rng)
    return small_talk(rng)


def conversation(rng: random.Random) -> list[Message]:
    """Draw a chat of one to six exchanges, with a system message in every third."""
    messages: list[Message] = []
    persona = rng.random()
    turns: list[Exchange]
    if persona < 0.04:
        name = rng.choice(CLASSES["pet"])
        messages.append(
            Message(
                "system",
                pick(
                    rng,
                    ("your name is $n.", "you are $n, a^ #good assistant.", "you are a helpful assistant named $n."),
                    {"n": name},
                ),
            )
        )
        turns = [
            (
                rng.choice(("what is your name", "who are you", "what's your name", "introduce yourself")),
                pick(
                    rng,
                    ("my name is $n.", "I am $n{, and I am here to help|, your assistant}.", "you can call me $n."),
                    {"n": name},
                ),
            )
        ]
        turns = [*(exchange(rng) for _ in range(rng.choice((0, 0, 1)))), *turns]
    else:
        if persona < 0.36:
            messages.append(Message("system", rng.choice(SYSTEM_PROMPTS)))
        if rng.random() < 0.12:
            turns = memory(rng)
        else:
            turns = [exchange(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 5)))]
    for ask, answer in turns:
        messages += [Message("user", as_typed(rng, ask)), Message("assistant", capitalise(answer.strip()))]
    return messages
