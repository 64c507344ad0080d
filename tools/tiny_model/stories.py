"""Short stories: a cast is drawn first, then a plot is told about it, one written sentence pattern per step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tiny_model.grammar import pick
from tiny_model.lexicon import CLASSES

Cast = dict[str, str]
Plot = Sequence[Sequence[str]]

_PRONOUNS = {"girl": ("she", "her", "her"), "boy": ("he", "him", "his"), "beast": ("it", "it", "its")}


def make_cast(rng: random.Random, *, kind: str | None = None, name: str | None = None) -> Cast:
    """Draw who a story is about and what is in it.

    Args:
        rng: source of every choice.
        kind: what the hero is ("girl", "boy", an animal, a wonder such as "dragon"); drawn when None.
        name: the hero's name; drawn when None.

    Returns:
        Slots: ``n`` name, ``kind``, ``h``/``o``/``p`` pronouns, ``f`` friend, ``fk`` friend's kind, ``place``, ``thing``
        and others the plots use.
    """
    if kind is None:
        roll = rng.random()
        kind = rng.choice(("girl", "boy")) if roll < 0.5 else rng.choice(CLASSES["beast" if roll < 0.8 else "wonder"])
    gender = kind if kind in ("girl", "boy") else rng.choice(("girl", "boy"))
    gender = {"queen": "girl", "king": "boy", "mermaid": "girl", "knight": gender, "wizard": gender}.get(kind, gender)
    if kind == "robot":
        gender = "beast"
    names = CLASSES[gender] if kind in ("girl", "boy", "king", "queen", "knight", "pirate") else CLASSES["pet"]
    chosen = name or rng.choice(names)
    subject, obj, possessive = _PRONOUNS[gender]
    friend_kind = rng.choice(CLASSES["beast"])
    while friend_kind == kind:
        friend_kind = rng.choice(CLASSES["beast"])
    friend = rng.choice(CLASSES["pet"] + CLASSES["name"])
    while friend == chosen:
        friend = rng.choice(CLASSES["pet"] + CLASSES["name"])
    cast = {"n": chosen, "kind": kind, "h": subject, "o": obj, "p": possessive, "f": friend, "fk": friend_kind}
    for slot in ("place", "thing", "colour", "food", "good", "look", "job", "elder", "hiding", "outdoors", "fruit"):
        cast[slot] = rng.choice(CLASSES[slot])
    cast["place2"] = rng.choice(CLASSES["outdoors"])
    while cast["place2"] == cast["place"]:
        cast["place2"] = rng.choice(CLASSES["outdoors"])
    cast["beast"] = rng.choice(CLASSES["small_beast"])
    return cast


OPENINGS = (
    "{once upon a time|once|long ago|many years ago}, there was a^ {$good|little|young} $kind named $n.",
    "once upon a time, a^ {$good|little|young} $kind {named|called} $n lived {near|by|not far from} the $place.",
    "there was once a^ $kind {named|called} $n, who lived {near|by} the $place.",
    "$n was a^ {$good|little|young} $kind who {lived near|loved|often went to} the $place.",
    "in a {small|quiet|sunny} house near the $place lived a^ $kind {named|called} $n.",
    "far away, {near|beside} a^ #scene {village|valley|forest|lake|river|beach|harbour|hill}, there lived a^ $good $kind named $n.",
    "this is a story about a^ $good $kind {named|called} $n.",
)
TRAITS = (
    "everyone said that $n was $good{, and it was true| and #good|}.",
    "$n had a^ #adj $colour $thing, and $h {was very proud of it|took it everywhere}.",
    "$h liked {the #nature|#food|the sound of the rain|long walks|quiet evenings} more than anything else.",
    "every {morning|evening|day}, $n {walked to|looked at|visited} the {$place2|#outdoors} and {sang a song|counted the #nature|thought about the world|watched the #nature}.",
    "$h lived with $p #elder{, who was very #good| and had #count books}.",
    "$n had many {dreams|questions|plans|ideas}, but {no one to share them with|not much time for them|very little money}.",
    "",
    "",
)
ENDINGS = (
    "{from that day on|after that}, $n and $f were {good|close|the best of} friends.",
    "$n went home {#mood_good and a little tired|with a big smile|under the first stars}, and $h slept very well that night.",
    "and that is how $n learned that {it is good to be $good|a friend is worth more than gold|small steps can take you far|it is fine to ask for help|kind words cost nothing|patience brings good things|being brave does not mean having no fear|we should take care of small things|it is better to share than to keep}.",
    "{that evening|that night}, they {ate #food together|sat by the fire and told stories|watched the #nature|laughed about it for a long time}, and everyone was #mood_good.",
    "$n never forgot that day.",
    "and they all lived {happily|in peace} {ever after|for many years}.",
    '"{today was a good day|what a day|thank you, my friend|now I understand}", said $n{, and $h meant it| with a smile|}.',
)

_LOST: Plot = (
    (
        "#time, $n {could not find|lost|was looking for} $p $colour $thing.",
        "#time, $n {noticed|saw} that $p $colour $thing was gone.",
    ),
    (
        "$h felt very #mood_bad, because the $thing was a gift from $p #elder.",
        "it was $p favourite $thing, and $h felt #mood_bad.",
        '"oh no", said $n. "where is my $thing?"',
    ),
    (
        "$h looked {under the bed|in the #place|behind the door}, but {it was not there|there was nothing there|$h only found an old #thing}.",
        "first $h looked #hiding. then $h looked #hiding. the $thing was not there.",
        "$h searched the whole {morning|afternoon|day}, but $h could not find it.",
    ),
    (
        'then $n met $f, a^ {friendly|#good} $fk. "{why are you so sad|what is wrong|what are you looking for}?" asked $f.',
        "$n asked $f the $fk for help.",
        "a^ #good $fk named $f {came by|was passing} and {saw|heard} $n.",
    ),
    (
        '"I have lost my $thing", said $n. "{can|will} you help me?" "of course", said $f.',
        '"let us look together", said $f. "four eyes see more than two."',
        '$f {thought for a moment|looked around|listened} and said, "{let us|we should} look $hiding."',
    ),
    (
        "together they looked $hiding, and there it was, the $colour $thing!",
        "they {went|walked} to the $place2, and $f {found|saw} the $thing $hiding.",
        "at last, they found the $thing $hiding.",
    ),
    (
        "$n was so #mood_good that $h {danced|sang|laughed|hugged $f}.",
        '"thank you, $f", said $n. "{you are a true friend|I will never forget this}."',
    ),
)
_SHARE: Plot = (
    (
        "#time, $n {made|had|packed} some {fresh|warm|} $food for {lunch|a long walk|the day}.",
        "#time, $n {took|carried} a basket of $food to the $place2.",
    ),
    (
        "on the way, $h {met|saw} a^ $fk named $f, who {looked hungry|had nothing to eat|was very #mood_bad}.",
        "under a tree sat a^ {sad|tired|hungry|thin} $fk. its name was $f.",
    ),
    (
        '"{good morning|hello}", said $f. "{I have not eaten since #day|I am so hungry|that smells very good}."',
        '"what do you have there?" asked $f. "some $food", said $n.',
    ),
    (
        "$n looked at the $food. there was {not much|only a little}, but $h {smiled|thought of $p #elder, who always shared|did not wait long}.",
        "at first, $n wanted to keep the $food. then $h saw how hungry $f was.",
    ),
    (
        '"{let us share it|half of it is for you|sit down and eat with me}", said $n.',
        "$h broke the $food in two and gave $f the bigger part.",
    ),
    (
        "{some days later|the next week|when winter came}, $n {lost the way near the #outdoors|was cold and hungry|could not carry a heavy #thing home}.",
        "{later that day|the next day}, it began to rain, and $n had no place to stay.",
    ),
    (
        "$f {came at once|remembered $n} and {helped|showed the way home|shared a warm place by the fire}.",
        '"now it is my turn to help", said $f{, and brought a^ warm #thing|}.',
    ),
)
_FEAR: Plot = (
    (
        "$n had one problem: $h was afraid of {the dark|thunder|deep water|high places|the old house on the hill}.",
        "but there was one thing $n did not like: {the dark|thunder|the wind at night|deep water}.",
    ),
    (
        "#time, $p friend $f {was lost in the #outdoors|needed help|did not come home}.",
        "#time, a^ {terrible|strange} {noise|sound} came from the $place2.",
    ),
    (
        "$n {stood at the door|looked outside|held $p $thing}. $p heart beat fast.",
        '"I cannot go", said $n. "I am too afraid."',
    ),
    (
        'then $h thought of what $p #elder always said: "{take one small step|a deep breath helps|look at what scares you, and it gets smaller}."',
        "but $n knew that {somebody had to go|a friend was waiting|waiting would not help}.",
    ),
    (
        "so $n took a^ #adj {lamp|lantern} and {walked|went} #slowly {to the $place2|down the path}.",
        "$h took a deep breath and {took one step, and then another|opened the door}.",
    ),
    (
        "{there|soon} $h {found|saw} $f the $fk, {cold and tired|sitting behind a stone|who was even more afraid}.",
        "the {noise|sound} came from $f, a^ {small|young} $fk who had lost the way.",
    ),
    (
        '"{you came|I knew you would come}!" {said|cried} $f. "{I was afraid too|you are so brave}."',
        '"do not worry", said $n. "we will go home together."',
    ),
)
_CARE: Plot = (
    (
        "#time, $n found a {small|tiny} $beast {by|near} the $place2.",
        "#time, a {little|tiny} $beast {sat|lay} in front of the door.",
    ),
    (
        "it {had hurt its leg|was wet and cold|was all alone|could not find its mother}.",
        "the $beast {looked up with big eyes|was shaking|made a very small sound}.",
    ),
    (
        '"{poor little thing|do not be afraid}", said $n. "I will {help you|take care of you}."',
        "$n {wrapped it in a #look blanket|carried it home #slowly|gave it some water}.",
    ),
    (
        "{every day|each morning and each evening}, $h {fed|looked after} the $beast and {told it stories|sang to it|kept it warm}.",
        "$p #elder {helped $o make a #look bed for it|brought #food and a soft blanket}.",
    ),
    ("after #count days, the $beast was {strong|well} again.", "week after week, the $beast grew {stronger|bigger}."),
    (
        '"{now you can go home|it is time to go}", said $n, {a little sad but #mood_good|and opened the door}.',
        "$n took the $beast back to the $place2, where its family was waiting.",
    ),
    (
        "the $beast {looked back once|came back every #season|left a #colour #thing at the door as a thank you}.",
        "{sometimes|now and then}, the $beast comes to visit, and $n {gives it #food|tells it a story}.",
    ),
)
_MAKE: Plot = (
    (
        "$n wanted to {make|build} a^ $look $thing for $p #elder.",
        "#time, $n had an idea: $h would make a^ $colour $thing {all alone|with $p own hands}.",
    ),
    (
        "$h {collected|found|bought} {some wood and a little paint|paper, string and glue|everything $h needed}, and {started to work|began at once}.",
        "$h worked {all day|the whole morning|until it was dark}.",
    ),
    (
        "but the first $thing {broke|fell apart|was much too {big|small|heavy|wide}|looked more like a^ #thing}.",
        "it did not go well. the $thing {broke in two|fell on the floor}.",
    ),
    ("$n was #mood_bad and {wanted to give up|put it in a corner|sat down}.", '"I will never learn this", said $n.'),
    (
        'then $f the $fk {said|told $o}, "{try again, but more slowly|nobody gets it right the first time|every mistake teaches you something}."',
        'an old $job {saw it and smiled|came by}. "{start again, and take your time|look, hold it like this}", said the $job.',
    ),
    (
        "so $n tried again, {slowly this time|more carefully|step by step}.",
        "the next day, $n {started again|made a better plan}.",
    ),
    (
        "{at last|after #count days}, the $thing was {ready|finished|beautiful}, and everyone {liked it|came to see it}.",
        "this time, the $thing was {just right|strong and #look}.",
    ),
)
_JOURNEY: Plot = (
    (
        "$n had always wanted to see the {sea|big city|top of the mountain|end of the river|great forest|northern lights}.",
        "#time, $n {found|got} an old map that showed the way to {a hidden lake|a secret garden|an island|a tower}.",
    ),
    (
        "$h packed a^ #thing, some #food and a warm #colour blanket, and {left|set off} {before the sun came up|early in the morning|without a sound}.",
        "with a^ #look #thing and a bag of #food, $n started to walk.",
    ),
    (
        "{on the first day|after #count hours}, $h met $f, a^ #good $fk who {was going the same way|knew every path}.",
        "the road was long, but then a^ $fk named $f {joined $o|showed $o the way}.",
    ),
    (
        "they {crossed {an old|a long|a narrow} bridge|climbed over a {high|green|steep} hill|walked through the #outdoors} and slept {under the stars|in an old barn|beside a small fire}.",
        "it was #weather, and the path was {steep|narrow|full of stones}, but they {sang|told jokes|helped each other}.",
    ),
    (
        "{on the third day|at last}, they {reached the place|arrived}, and it was more beautiful than any {story|picture}.",
        "then they saw it, bright in the light of the {morning|evening|moon}.",
    ),
    (
        '"{it was worth every step|look at that}", said $f.',
        "$n {sat down and said nothing for a long time|laughed with joy|wanted to remember it for ever}.",
    ),
    (
        "when $n came home, $h {told everyone about it|drew a picture of it|had a story for every evening of the winter}.",
    ),
)
_GARDEN: Plot = (
    (
        "#time, $p #elder gave $n a^ {tiny|strange|small} seed.",
        "#time, $n found a^ #colour seed {near the $place|$hiding}.",
    ),
    (
        "$n planted it {in the garden|in a #look pot|beside the #outdoors} and gave it water.",
        '"plant it and be patient", said {the old $job|$f the $fk}.',
    ),
    (
        "{the first week|for many days}, nothing happened.",
        "$n looked at it every {morning|day}, but there was only earth.",
    ),
    (
        '$f the $fk {laughed|said}, "{nothing will grow there|maybe it is only a stone}." but $n {did not give up|kept giving it water}.',
        "it was hard to wait, but $n {sang to the seed|stayed calm|gave it water every day}.",
    ),
    ("then, after the rain, a {small|tiny} green leaf came out.", "#time, there was a {small|tiny} green leaf."),
    (
        "the plant grew and grew, until it was taller than {the house|$n|the fence}, and it carried {big|small} #colour {flowers|fruits}.",
        "by {summer|autumn}, there was a {big|tall|large} {tree|plant} full of {$colour flowers|sweet fruits}.",
    ),
    ("$n {shared the fruits with everyone|gave the first flower to $p #elder|kept one seed for the next year}.",),
)
_CONTEST: Plot = (
    (
        "every {#season|year}, there was a {race|song contest|cake contest} in the {village|town|valley}.",
        "#time, everybody came to the $place2 for the great {race|contest}.",
    ),
    (
        "$n wanted to {win|take part} more than anything, and $h {practised every day|got up early to practise}.",
        "the prize was a^ #look {golden|silver} #thing.",
    ),
    (
        "$f the $fk was {the best of all|very fast|sure to win}, and {everyone knew it|liked to talk about it}.",
        '"nobody can beat me", said $f the $fk.',
    ),
    (
        "{halfway through|in the middle of it}, $f {fell over a stone|hurt a foot|got lost}.",
        "then something happened: $f {fell down|could not go on}.",
    ),
    (
        "$n {stopped|looked back}. {to win was now easy|the prize was very near}, but $h {turned round|could not leave a friend alone}.",
        "$n {thought of the prize|looked at the prize} and then at $f.",
    ),
    (
        '"{take my hand|come, we go together}", said $n, and {they finished side by side|they came in last, but together}.',
        "$h helped $f up, and they {crossed the line|finished} together.",
    ),
    (
        "everyone {cheered|clapped}, and {the prize was shared|the old $job gave both of them a prize|nobody cared who was first}.",
    ),
)
_ROBOT: Plot = (
    (
        "$n was not like the others: $h {could not fly|did not like gold|was afraid of mice|wanted to learn to {cook|dance|paint|read|sing}}.",
        "everyone near the $place {was afraid of|talked about} $n, but nobody really knew $o.",
    ),
    (
        '#time, a child named $f {knocked at the door|came along the road} and asked, "{are you really a^ $kind|can you help me|will you play with me}?"',
    ),
    (
        '"{yes|I am}", said $n. "{are you not afraid of me|how did you find me}?" "not at all", said $f{. "you look {kind|friendly|nice}."|.}',
        "$n was very surprised. {no one had ever asked before|visitors were rare}.",
    ),
    (
        "together they {baked #food|read a book about the #nature|painted the door #colour|repaired an old #thing|played until the sun went down}.",
        "$f taught $n how to {make #food|play the #thing|write a letter|count the stars}.",
    ),
    (
        "{soon|after a while}, the other people {came to see|heard about it} and {were not afraid any more|brought #food and music}.",
        '"{we were wrong about you|please stay with us}", said the old $job of the village.',
    ),
    (
        "$n {had never been so #mood_good|felt at home at last}.",
        "for the first time, $n {had friends|did not feel lonely}.",
    ),
)
# each plot with the steps that may be left out: no other step depends on them
PLOTS: tuple[tuple[Plot, frozenset[int]], ...] = (
    (_LOST, frozenset((1, 2))),
    (_SHARE, frozenset((2, 3))),
    (_FEAR, frozenset((2, 3))),
    (_CARE, frozenset((1, 3))),
    (_MAKE, frozenset((3,))),
    (_JOURNEY, frozenset((3,))),
    (_GARDEN, frozenset((2, 3))),
    (_CONTEST, frozenset((4,))),
)
_ROBOT_OPTIONAL = frozenset((2, 4))


def tell_story(rng: random.Random, cast: Cast | None = None, *, short: bool = False) -> str:
    """Return one story as a paragraph.

    Args:
        rng: source of every choice.
        cast: who it is about; drawn when None.
        short: leave out traits and some middle steps, as a chat answer would.
    """
    cast = cast or make_cast(rng)
    plot, optional = rng.choice(PLOTS)
    if cast["kind"] in CLASSES["wonder"] and rng.random() < 0.6:
        plot, optional = _ROBOT, _ROBOT_OPTIONAL
        cast = cast | {"f": rng.choice([name for name in CLASSES["name"] if name != cast["n"]])}
    sentences = [pick(rng, OPENINGS, cast)]
    sentences += [pick(rng, TRAITS, cast) for _ in range(0 if short else rng.choice((0, 1, 1, 2)))]
    for position, step in enumerate(plot):
        if position not in optional or rng.random() > (0.5 if short else 0.15):
            sentences.append(pick(rng, step, cast))
    friend_is_known = any(cast["f"] in sentence for sentence in sentences)
    endings = [ending for ending in ENDINGS if friend_is_known or "$f" not in ending]
    sentences += [pick(rng, rng.sample(endings, 1), cast) for _ in range(1 if short else rng.choice((1, 1, 2)))]
    if rng.random() < 0.12:
        sentences.append("The end.")
    return " ".join(dict.fromkeys(sentence for sentence in sentences if sentence))


def story_request(rng: random.Random) -> tuple[str, str]:
    """Return a request for a story, and the story that answers it."""
    kind = rng.choice(("girl", "boy", *CLASSES["beast"], *CLASSES["wonder"]))
    cast = make_cast(rng, kind=kind)
    ask = pick(
        rng,
        (
            "{tell me|write|can you tell me} a {short |little |}story about a^ {$good|little|} $kind",
            "{tell me|write|I want} a {short |}story about a^ $kind {named|called} $n",
            "{please |}{tell|write} me a {bedtime |}story about a^ $kind {in|near} the $place",
            "write a {short |}story about a^ $kind, please",
            "{tell me|make up} a story with a^ $kind and a^ $fk",
            "tell me {a story|a short story|something nice}",
        ),
        cast,
    )
    lead = rng.choice(("", "", "", "Here is a story. ", "Of course. "))
    return ask, lead + tell_story(rng, cast, short=rng.random() < 0.7)
