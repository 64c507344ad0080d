"""What the model does not know or cannot do, and how it says so."""

from __future__ import annotations

import random

from tiny_model.grammar import Exchange, capitalise, pick

_HARD = (
    "quantum physics",
    "the stock market",
    "politics",
    "the last election",
    "tax law",
    "chemistry",
    "my computer problem",
    "medicine",
    "philosophy",
    "the news",
    "the theory of relativity",
    "the world cup",
    "cryptography",
    "football results",
    "Roman law",
    "nuclear power",
    "modern poetry",
    "economics",
    "the second world war",
    "my homework in biology",
    "the French Revolution",
    "the price of gold",
    "space travel",
    "religion",
    "genetics",
    "the Roman Empire",
    "chess openings",
    "astronomy",
    "famous actors",
    "the internet",
    "machine translation",
    "the meaning of life",
    "black holes",
    "dinosaurs",
    "Shakespeare",
    "linear algebra",
)

_NOW = (
    "what time is it",
    "what day is it today",
    "what is the weather like today",
    "will it rain tomorrow",
    "what is the date",
    "what is in the news",
    "who won the game yesterday",
    "how is the weather",
    "what will happen tomorrow",
    "is it cold outside",
    "where is my key",
    "what am I thinking",
    "what did I eat yesterday",
    "how much money do I have",
    "what is the temperature outside",
)

_TASKS = (
    "write a program in $x",
    "translate this into $x",
    "write an essay about $x",
    "solve this equation",
    "book a hotel for me",
    "send an email to #name",
    "open the window",
    "call my #kin",
    "write a long report about $x",
    "play some music",
    "draw a picture of a^ #beast",
    "fix my code",
    "buy me a^ #thing",
    "summarise the book $x",
    "order a pizza",
    "show me a photo of $x",
    "write a contract",
)

_SYLLABLES = "ba be bo da do fa fi ga go ka ke ki la le lo ma mi mo na ne no pa po ra re ri sa si so ta te ti to va vi vo za zu".split()

_REFUSALS = (
    "I am {sorry, I am |}a small model and I do not know {that|much about $x|enough about $x}.",
    "I do not know {that|much about $x}. I am {only a|a very} small model.",
    "sorry, {that is too hard for me|I cannot answer that}. I am a small model and know only simple things.",
    "I am not sure. {a larger model could tell you more about $x|please ask someone who knows $x}.",
    "that is a good question, but I am too small to know {the answer|about $x}.",
)

_NOW_REFUSALS = (
    "I cannot {see|know} {that|what happens outside}. I am a small model without {eyes|a clock|the internet}.",
    "I do not know, because I cannot look {outside|at the world}. {please look yourself|you can see it better than I can}.",
    "I am sorry, I only know what I was trained on, and {that is not part of it|not what happens now}.",
)

_TASK_REFUSALS = (
    "I am sorry, I cannot do that. I {can only write short texts|am a small model and only write simple sentences}.",
    "that is {too hard|too much} for me. I can {tell a story|answer a simple question} instead.",
    "I cannot do that, but I can {tell you a story|talk about animals|count to ten}.",
)


def invented_word(rng: random.Random) -> str:
    """A word that means nothing, to stand for all that the model has never heard of."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 3, 3, 4)))) + rng.choice(
        ("", "", "n", "s", "r")
    )


def refusal(rng: random.Random) -> Exchange:
    word = capitalise(invented_word(rng)) if rng.random() < 0.6 else invented_word(rng)
    slots = {"x": rng.choice(_HARD) if rng.random() < 0.55 else word}
    form = rng.randrange(4)
    if form == 0:
        return rng.choice(_NOW), pick(rng, _NOW_REFUSALS, slots)
    if form == 1:
        return pick(rng, _TASKS, slots), pick(rng, _TASK_REFUSALS, slots)
    asks = (
        "what is $x",
        "explain $x",
        "tell me about $x",
        "what do you know about $x",
        "can you explain $x to me",
        "help me with $x",
        "who invented $x",
        "how does $x work",
        "I have a question about $x",
        "what do you think about $x",
    )
    if slots["x"] == word:
        asks += (
            "who is $x",
            "where is $x",
            "who was $x {|Miller|Stone|Bell}",
            "what is the capital of $x",
            "what does $x mean",
            "have you heard of $x",
        )
    return pick(rng, asks, slots), pick(rng, _REFUSALS, slots)
