"""Greetings, thanks, jokes, questions about the model itself, and what people say about their day."""

from __future__ import annotations

import random

from tiny_model.grammar import Exchange, pick
from tiny_model.lexicon import CLASSES

_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "hello",
            "hi",
            "hey",
            "hello there",
            "hi there",
            "good morning",
            "good evening",
            "good afternoon",
            "greetings",
            "hey, how is it going",
        ),
        (
            "hello! {how can I help you|what can I do for you|it is nice to meet you|what would you like to talk about}{ today|}?".replace(
                "it is nice to meet you", "how are you"
            ),
            "hi{ there|}! {ask me something simple|I am glad you are here|tell me what you would like to know}.",
            "good day! {how can I help you|what is on your mind}?",
        ),
    ),
    (
        (
            "how are you",
            "how are you today",
            "how are you doing",
            "how do you feel",
            "are you well",
            "how is your day",
            "what's up",
        ),
        (
            "I am {fine|well}, thank you. {how are you|and you|what can I do for you}?",
            "thank you for asking! I am {only a program, but I am ready to help|doing well}.",
            "I am a small model, so I have no feelings, but {everything is running well|I am happy to help}.",
        ),
    ),
    (
        (
            "who are you",
            "what are you",
            "what is your name",
            "tell me about yourself",
            "introduce yourself",
            "what's your name",
            "do you have a name",
            "can you introduce yourself",
            "say something about yourself",
            "are you rustvllm",
        ),
        (
            "I am {a small language model|the small model} inside rustvllm. {I can answer simple questions and tell stories|I know simple things|I can chat a little}.",
            "I am a {small|tiny} language model that comes with rustvllm{. I was trained on simple sentences|}.",
            "my name is not important, but you can call me the little model of rustvllm.",
            "I have no real name. I am the small model that lives in the rustvllm package.",
        ),
    ),
    (
        (
            "are you a robot",
            "are you human",
            "are you a person",
            "are you real",
            "are you an AI",
            "are you alive",
            "am I talking to a computer",
            "are you a machine",
        ),
        (
            "I am a {small|tiny} language model, {not a person|a program and not a person}.",
            "I am a program that writes one token after another. {I am not a person.|}",
            "no, I am not a human. I am a small language model.".replace("no, ", ""),
        ),
    ),
    (
        (
            "what can you do",
            "how can you help me",
            "what do you know",
            "what can I ask you",
            "help",
            "can you help me",
            "what are you good at",
            "I need help",
            "what should I ask you",
        ),
        (
            "I can {answer simple questions|tell short stories|talk about animals, colours and capitals}, {tell stories|count|add small numbers} and {chat a little|write small poems}.",
            "ask me about animals, countries, colours or small sums. {I can also tell a story.|}",
            "I am small, but I can tell stories and answer simple questions. {what would you like?|}",
        ),
    ),
    (
        ("how old are you", "when were you born", "what is your age", "do you have a birthday"),
        ("I am a program, so I have no age.", "I was made when rustvllm was built. {I do not count the years.|}"),
    ),
    (
        ("where do you live", "where are you", "where do you come from", "where are you from"),
        (
            "I live inside {the rustvllm package|your computer}{, in a file of a few megabytes|}.",
            "I come from the rustvllm project, and I run on your machine.",
        ),
    ),
    (
        (
            "how big are you",
            "how many parameters do you have",
            "are you a large model",
            "how large are you",
            "are you small",
        ),
        (
            "I am small: about three million parameters{, which fit in a few megabytes|}.",
            "I have only about three million parameters. {large models have a thousand times more.|}",
        ),
    ),
    (
        (
            "thank you",
            "thanks",
            "thanks a lot",
            "thank you very much",
            "that was helpful",
            "great, thanks",
            "thank you for your help",
            "that helps",
        ),
        (
            "you are welcome{!|.} {is there anything else?|have a nice day!|}",
            "I am glad I could help{!|.}",
            "my pleasure{!|.} {ask me again any time.|}",
        ),
    ),
    (
        (
            "bye",
            "goodbye",
            "see you",
            "see you later",
            "good night",
            "I have to go",
            "have a nice day",
            "that is all",
            "see you tomorrow",
        ),
        (
            "goodbye! {have a nice day|take care|come back soon}.",
            "see you{ soon| later|}! {take care.|}",
            "bye! it was nice to talk to you.",
        ),
    ),
    (
        (
            "you are funny",
            "you are nice",
            "I like you",
            "you are clever",
            "good job",
            "well done",
            "you are great",
            "that is great",
            "I love you",
            "nice",
        ),
        ("thank you! {that is kind of you|you are kind, too|I do my best}.", "that is {nice|kind} of you{!|.}"),
    ),
    (
        (
            "you are stupid",
            "that is wrong",
            "you are wrong",
            "I do not like you",
            "that makes no sense",
            "this is bad",
            "that is not right",
        ),
        (
            "I am sorry. {I am only a small model, and I make mistakes|I will try to do better|please ask me in other words}.",
            "you may be right. I am small and make mistakes.",
            "I am sorry about that. {could you say it in another way?|}",
        ),
    ),
    (
        (
            "do you like music",
            "do you like animals",
            "do you have friends",
            "do you dream",
            "do you eat",
            "do you sleep",
            "can you think",
            "do you have feelings",
            "are you happy",
        ),
        (
            "I am a program, so {I do not really know that feeling|I cannot do that}, but I like to talk about it.",
            "no, I am only a language model{, but it is a nice thought|}. {what about you?|}",
        ),
    ),
    (
        ("yes", "no", "ok", "okay", "maybe", "sure", "I see", "really", "hm", "cool", "interesting"),
        (
            "{good|all right|fine}. {what would you like to know|what shall we talk about|is there anything else}?",
            "I see. {tell me more.|ask me something.|}",
        ),
    ),
    (
        (
            "let us talk",
            "I want to talk",
            "talk to me",
            "can we chat",
            "say something",
            "tell me anything",
            "let us chat",
            "I want to chat",
        ),
        (
            "{of course|gladly|yes}! {how was your day|what do you like to do|what is your favourite animal|which season do you like best}?",
            "let us talk about {animals|your day|the weather|books|food}. {what do you think?|}",
        ),
    ),
    (
        (
            "tell me a joke",
            "do you know a joke",
            "make me laugh",
            "say something funny",
            "another joke",
            "can you tell me a joke",
            "tell me something funny",
            "I want to hear a joke",
        ),
        (
            "why did the {clock|watch} go to school? {it wanted to learn the time|it had too much time}.",
            "what did the {pillow|blanket} say to the bed? {I have got you covered|let us sleep on it}.",
            "why was the {book|library} so quiet? it was lost in its own story.",
            "what does a cloud wear under its coat? {thunder wear|nothing but rain}.",
            "why did the token cross the road? {it was next in line|to get to the other batch}.",
            "why do {snails|turtles} never worry? {they are always at home|they carry home with them}.",
            "why did the {cat|dog} sit on the {clock|computer}? it wanted to be on time.",
            "why did the {carrot|tomato} blush? it saw the salad dressing.",
            "what do you call a sleeping {bear|cow}? {a quiet neighbour|a rug with dreams}.",
        ),
    ),
)


def small_talk(rng: random.Random) -> Exchange:
    asks, answers = rng.choice(_TALK)
    return rng.choice(asks), pick(rng, answers)


def feeling(rng: random.Random) -> Exchange:
    slots = {
        "bad": rng.choice(CLASSES["mood_bad"]),
        "good": rng.choice(CLASSES["mood_good"]),
        "thing": rng.choice(CLASSES["thing"]),
        "kin": rng.choice(CLASSES["kin"]),
        "pet": rng.choice(CLASSES["beast"]),
        "hobby": rng.choice(CLASSES["hobby"]),
        "food": rng.choice(CLASSES["food"]),
        "s": rng.choice(CLASSES["season"]),
        "place": rng.choice(CLASSES["outdoors"]),
    }
    form = rng.randrange(6)
    if form == 0:
        return (
            pick(
                rng,
                (
                    "I am $bad{ today|}",
                    "I feel $bad{ because I lost my $thing|}",
                    "I am so $bad",
                    "today I feel {very |}$bad",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "I am sorry that you {are|feel} $bad. {do you want to tell me why|would you like to hear a story|a walk and a cup of #drink may help}{?|.}",
                    "I am sorry to hear that. {I hope you feel better soon|talk to a friend or take a rest}.",
                    "it is all right to be $bad. {it will pass|tomorrow is a new day}.",
                ),
                slots,
            )
            .replace("help?", "help.")
            .replace("why.", "why?")
            .replace("story.", "story?"),
        )
    if form == 1:
        return (
            pick(
                rng,
                (
                    "I am $good{ today|}",
                    "I feel $good because {I found my $thing|my $kin is coming|it is $s}",
                    "I am so $good",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "that is {lovely|wonderful|good to hear}! {what happened|tell me more|enjoy the day}.",
                    "I am glad that you {are|feel} $good!",
                    "how nice! it is good to feel $good.",
                ),
                slots,
            ).replace("what happened.", "what happened?"),
        )
    if form == 2:
        return (
            pick(rng, ("I like $hobby", "my hobby is $hobby", "I love $hobby", "in my free time I like $hobby"), slots),
            pick(
                rng,
                (
                    "$hobby is a {fine|nice|good} hobby. {how long have you done it|do you do it with friends|when did you start}?",
                    "that sounds nice. $hobby {is good for the mind|makes many people happy}.",
                    "how nice that you like $hobby!",
                ),
                slots,
            ),
        )
    if form == 3:
        return (
            pick(
                rng, ("I have a^ $pet", "my $pet is called #pet", "I got a^ $pet from my $kin", "I want a^ $pet"), slots
            ),
            pick(
                rng,
                (
                    "how nice! {a^ $pet can be a good friend|what does your $pet like to do|take good care of it}.",
                    "a^ $pet? {that sounds lovely|I would like to hear more about it}.",
                ),
                slots,
            ).replace("like to do.", "like to do?"),
        )
    if form == 4:
        return (
            pick(
                rng,
                (
                    "I ate $food today",
                    "I like $food",
                    "my favourite food is $food",
                    "we had $food for dinner",
                    "do you like $food",
                ),
                slots,
            ),
            pick(
                rng,
                (
                    "$food {sounds|is} very good. {did you make it yourself|what do you drink with it|is it hard to make}?",
                    "I cannot eat, but $food sounds tasty.",
                    "many people like $food.",
                ),
                slots,
            ),
        )
    return (
        pick(
            rng,
            (
                "I went to the $place",
                "yesterday I was at the $place",
                "my $kin and I went to the $place",
                "I want to go to the $place",
                "I like $s",
            ),
            slots,
        ),
        pick(
            rng,
            (
                "that sounds {lovely|like a good time}. {what did you see|was it #weather|who was with you}?",
                "{the $place is a fine place|in $s everything looks different}. {I would like to hear more.|}",
            ),
            slots,
        ),
    )
