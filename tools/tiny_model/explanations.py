"""Written explanations: what things are, why things happen, how things are done, and how a language model is served.

Each entry is (ways to ask, ways to answer); answers are templates of `tiny_model.grammar`.
"""

from __future__ import annotations

Entry = tuple[tuple[str, ...], tuple[str, ...]]

# name: (what it is, one more sentence about it)
DEFINITIONS: dict[str, tuple[str, str]] = {
    "a mountain": ("a very high piece of land", "the air at the top is cold and thin"),
    "a river": ("water that flows over the land to the sea", "it begins as a small spring"),
    "a lake": ("a large area of water with land all around it", "fish and ducks live there"),
    "an island": ("a piece of land with water on all sides", "you reach it by boat or by bridge"),
    "a desert": ("a very dry place where little rain falls", "the days are hot and the nights are cold"),
    "a forest": ("a large area covered with trees", "many animals find food and shelter there"),
    "a volcano": ("a mountain that can throw out hot melted rock", "most of them sleep for many years"),
    "an earthquake": ("a shaking of the ground", "it happens when large pieces of rock move deep below us"),
    "the sun": ("the star at the centre of our solar system", "it gives us light and warmth"),
    "the moon": ("a ball of rock that travels around the Earth", "it shines because it reflects the light of the sun"),
    "a star": ("a huge ball of hot gas that gives light", "the sun is the star nearest to us"),
    "a planet": ("a large round body that travels around a star", "the Earth is one of eight planets around the sun"),
    "a cloud": ("many tiny drops of water in the air", "when the drops grow heavy, it rains"),
    "rain": ("water that falls from the clouds", "plants need it to grow"),
    "snow": ("frozen water that falls in soft white flakes", "no two flakes look quite the same"),
    "wind": ("moving air", "it blows from places with high pressure to places with low pressure"),
    "a rainbow": ("a band of colours in the sky", "you can see it when the sun shines through rain"),
    "ice": ("frozen water", "it floats because it is lighter than water"),
    "a seed": ("a small part of a plant from which a new plant can grow", "it needs water, warmth and some time"),
    "a tree": ("a tall plant with a trunk of wood", "it gives shade, fruit and clean air"),
    "a flower": ("the part of a plant that makes seeds", "its colours and smell call the bees"),
    "a map": ("a drawing that shows where places are", "it helps you find the way"),
    "a library": ("a house full of books that people may borrow", "it is a quiet place to read"),
    "a museum": ("a house that keeps old or beautiful things", "visitors can look and learn there"),
    "a hospital": ("a place where ill people are cared for", "doctors and nurses work there day and night"),
    "a school": ("a place where children learn", "teachers help them to read, write and think"),
    "a market": ("a place where people buy and sell things", "you can find fruit, bread and flowers there"),
    "a friend": ("someone who likes you and helps you", "a good friend listens when you are sad"),
    "a family": ("a group of people who belong together", "parents, children and grandparents are part of it"),
    "music": ("sound that is put in order so that it is pleasant", "it can make people happy or calm"),
    "a poem": ("a short text with rhythm and pictures in words", "many poems rhyme, but they do not have to"),
    "a story": ("a report of things that happened to somebody, real or not", "it has a beginning, a middle and an end"),
    "a dream": ("a story your mind tells you while you sleep", "most dreams are soon forgotten"),
    "a year": ("the time the Earth needs to go once around the sun", "it has twelve months or 365 days"),
    "a week": ("a time of seven days", "it begins on Monday in many countries"),
    "a day": ("a time of twenty-four hours", "the Earth turns round once in a day"),
    "a month": ("one of the twelve parts of a year", "a month has about thirty days"),
    "an hour": ("a time of sixty minutes", "a day has twenty-four of them"),
    "a triangle": ("a shape with three sides", "its three corners are called angles"),
    "a circle": ("a round shape", "every point on it is equally far from the middle"),
    "a square": ("a shape with four equal sides", "all four corners are the same"),
    "bread": ("food that is baked from flour, water and yeast", "people all over the world eat it"),
    "cheese": ("food that is made from milk", "there are hundreds of kinds of it"),
    "honey": ("a sweet food that bees make from nectar", "it keeps for a very long time"),
    "friendship": ("a bond between people who trust each other", "it grows when people share time and help each other"),
    "courage": ("doing what is right although you are afraid", "even small steps can show it"),
    "patience": ("being able to wait calmly", "gardeners and teachers need a lot of it"),
    "honesty": ("telling the truth", "it is the ground on which trust is built"),
    "happiness": ("a warm feeling that life is good", "it often comes from small things"),
    "art": ("something people make to show beauty or a feeling", "pictures, songs and dances are all art"),
    "science": ("a careful way to find out how the world works", "scientists ask questions and test their answers"),
    "history": ("what people know about the past", "it is written in books, houses and old letters"),
    "gravity": ("the force that pulls things towards the Earth", "it is the reason why an apple falls down"),
    "electricity": ("a form of energy that flows through wires", "it makes lamps shine and machines run"),
    "a magnet": ("a piece of metal that pulls iron", "it has a north pole and a south pole"),
    "oxygen": ("a gas in the air that we need to breathe", "plants give it off in the light"),
    "a token": (
        "a small piece of text, such as a word or part of a word",
        "a language model reads and writes one token after another",
    ),
    "a tokenizer": ("the part that cuts text into tokens and turns tokens back into text", "each token has a number"),
    "a language model": (
        "a program that guesses the next token of a text",
        "by guessing again and again it writes whole sentences",
    ),
    "a neural network": (
        "a program made of many simple sums with weights that are learned from examples",
        "a language model is one kind of it",
    ),
    "a transformer": (
        "a neural network that uses attention to look back at earlier tokens",
        "most language models are built this way",
    ),
    "attention": (
        "the step where each token looks at the tokens before it and takes what it needs",
        "keys say what a token offers and queries say what is wanted",
    ),
    "the KV cache": (
        "the memory where a model keeps the keys and values of tokens it has already read",
        "thanks to it nothing has to be computed twice",
    ),
    "paged attention": (
        "a way to keep the KV cache in small blocks of equal size",
        "a table says which block comes next, so little memory is wasted",
    ),
    "a block table": (
        "a list that says which memory blocks belong to a request",
        "paged attention uses it to find keys and values",
    ),
    "continuous batching": (
        "a way to serve many requests together, where new ones join and finished ones leave at every step",
        "the machine stays busy and nobody waits for the slowest",
    ),
    "chunked prefill": ("reading a long prompt in pieces", "other requests can go on writing in between"),
    "prefill": (
        "the first phase, in which the model reads the whole prompt",
        "after it the model writes one token at a time",
    ),
    "decoding": (
        "the phase in which the model writes one token at a time",
        "each new token is added to the text and read again",
    ),
    "prefix caching": (
        "keeping the blocks of a prompt so that the next request with the same beginning can use them again",
        "it saves time when many prompts start alike",
    ),
    "preemption": (
        "taking the memory of one request away for a while so that others can go on",
        "the request is computed again later and loses nothing",
    ),
    "a scheduler": ("the part that decides which requests run in the next step", "it shares tokens and memory fairly"),
    "a batch": ("a group of requests that are computed together", "a larger batch uses the machine better"),
    "temperature": (
        "in sampling, a number that says how freely the model chooses its next token",
        "at zero it always takes the most likely one",
    ),
    "greedy decoding": ("always taking the most likely next token", "it gives the same answer every time"),
    "top-p sampling": (
        "choosing only among the most likely tokens that together reach a share p",
        "very unlikely words are left out",
    ),
    "a prompt": ("the text you give to a language model", "the model continues it or answers it"),
    "latency": ("the time you wait for an answer", "the time to the first token is one part of it"),
    "throughput": ("how much work is done in a second", "for a language model it is counted in tokens per second"),
    "a GPU": ("a chip that does many simple sums at the same time", "large language models run fast on it"),
    "a computer": ("a machine that follows instructions", "it is fast at sums and never gets tired"),
    "a server": (
        "a program that waits for requests and answers them",
        "rustvllm is such a program for language models",
    ),
    "an API": ("a fixed way for programs to talk to each other", "one program asks and the other answers"),
    "Rust": (
        "a programming language that is fast and careful with memory",
        "the control part of rustvllm is written in it",
    ),
    "Python": ("a programming language that is easy to read", "many people use it for work with language models"),
    "rustvllm": (
        "a server for language models with its control part written in Rust",
        "it keeps the KV cache in pages and batches requests continuously",
    ),
    "the context window": ("the number of tokens a model can look at at once", "mine is 512 tokens, which is small"),
    "an end token": ("a special token that says the answer is complete", "I write one when I have nothing more to say"),
    "streaming": (
        "sending an answer piece by piece while it is being written",
        "you can start reading before it is complete",
    ),
}

WHY: tuple[Entry, ...] = (
    (
        ("why is the sky blue",),
        (
            "the air spreads blue light more than red light, so the sky looks blue{ during the day|}.",
            "sunlight has all colours, and the air scatters blue the most. {that is why|therefore} the sky is blue.",
        ),
    ),
    (
        ("why is grass green", "why are leaves green"),
        (
            "plants have a green substance that catches sunlight. they use it to make food.",
            "the green comes from a substance that plants use to turn light into food.",
        ),
    ),
    (
        ("why do leaves fall in autumn", "why do trees lose their leaves"),
        (
            "trees let their leaves fall to save water in the cold {months|winter}.",
            "in winter there is little light and water, so many trees drop their leaves and rest.",
        ),
    ),
    (
        ("why do we sleep", "why do people sleep"),
        (
            "we sleep so that the body and the mind can rest{ and repair themselves|}.",
            "sleep gives us new strength and helps us remember what we learned.",
        ),
    ),
    (
        ("why do birds sing",),
        (
            "birds sing to find a partner and to tell others where they live.",
            'with their songs birds say, "this is my place", and they call a partner.',
        ),
    ),
    (
        ("why do birds fly south", "why do some birds leave in winter"),
        (
            "they fly to warmer places because there is more food there in winter.",
            "in winter insects are rare, so many birds fly to warm countries and come back in spring.",
        ),
    ),
    (
        ("why does it rain",),
        (
            "warm air carries water up. it cools down, becomes clouds, and falls as rain.",
            "drops in the clouds join together until they are so heavy that they fall.",
        ),
    ),
    (
        ("why do we have seasons", "why are there seasons"),
        (
            "the Earth is tilted, so each half gets more sun at one part of the year than at another.",
            "we have seasons because the axis of the Earth is tilted while it goes around the sun.",
        ),
    ),
    (
        ("why is the sea salty", "why is sea water salty"),
        (
            "rivers carry a little salt from the rocks into the sea, and it stays there.",
            "salt from rocks is washed into the sea{, and when water dries up the salt remains|}.",
        ),
    ),
    (("why do cats purr",), ("cats purr when they are content, and sometimes to calm themselves.",)),
    (
        ("why do dogs bark",),
        (
            "dogs bark to warn, to call or because they are excited.",
            "a dog barks to say something: come here, go away or let us play.",
        ),
    ),
    (
        ("why do bees make honey",),
        (
            "bees make honey as food for the winter.",
            "honey is their store of food for the cold months when there are no flowers.",
        ),
    ),
    (
        ("why do we eat", "why do we need food"),
        ("food gives us energy and lets us grow.", "we eat because the body needs energy{ and building material|}."),
    ),
    (
        ("why do we drink water", "why do people need water", "why is water important"),
        (
            "our body is mostly water, and we lose some all the time, so we must drink.",
            "every plant, animal and person needs water to live.",
        ),
    ),
    (
        ("why is reading good for you", "why should I read books"),
        (
            "reading teaches new words and takes you to places you have never seen.",
            "books let you see the world with the eyes of other people.",
        ),
    ),
    (
        ("why should I say thank you", "why is it good to be polite"),
        (
            "kind words show other people that you see what they do for you.",
            "being polite costs nothing and makes everyone's day better.",
        ),
    ),
    (
        ("why is the moon bright", "why does the moon shine"),
        ("the moon has no light of its own. it reflects the light of the sun.",),
    ),
    (("why do stars shine",), ("stars are so hot inside that they give off light for millions of years.",)),
    (("why does ice float",), ("ice is lighter than water, so it stays on top.",)),
    (
        ("why do we wear coats in winter", "why do people wear coats"),
        ("a coat keeps the warm air near the body{, so we do not get cold|}.",),
    ),
    (
        ("why do we brush our teeth", "why should I brush my teeth"),
        (
            "brushing removes small bits of food that would harm the teeth.",
            "clean teeth stay healthy{ and do not hurt|}.",
        ),
    ),
    (("why do people laugh",), ("people laugh when something is funny and when they feel safe with others.",)),
    (("why do people cry",), ("people cry when they are sad, hurt or very happy. afterwards they often feel better.",)),
    (
        ("why are you so small", "why is this model so small"),
        (
            "I am small so that I fit inside the package and start at once{ on any machine|}.",
            "a small model needs no download. that is why I know little.",
        ),
    ),
    (
        ("why is batching faster", "why does batching help"),
        ("in a batch the weights are read once for many requests, so the machine does more useful work.",),
    ),
    (
        ("why is the KV cache needed", "why do models use a KV cache"),
        ("without it the model would have to read the whole text again for every new token.",),
    ),
    (
        ("why is memory cut into blocks", "why are blocks used for the cache"),
        ("blocks of equal size can be given to any request, so hardly any memory is wasted.",),
    ),
    (
        ("why do language models make mistakes", "why do you make mistakes"),
        (
            "a language model only guesses likely words. it does not check them against the world.",
            "I guess the next word from what I have seen, and sometimes the guess is wrong.",
        ),
    ),
)

HOW: tuple[Entry, ...] = (
    (
        ("how do I make tea", "how do you make tea", "how can I make tea"),
        (
            "boil some water, pour it over the tea leaves and wait {three|four|five} minutes. {add milk or honey if you like.|}",
            "first boil water. then put tea in a pot, add the hot water and wait a little.",
        ),
    ),
    (
        ("how do I bake bread", "how do you bake bread", "how is bread made"),
        (
            "mix flour, water, salt and yeast. let the dough rest for {an hour|two hours} and bake it in a hot oven.",
            "make a dough from flour, water, yeast and salt. let it rise, and bake it until it is brown.",
        ),
    ),
    (
        ("how do I boil an egg", "how do you cook an egg"),
        ("put the egg in boiling water. after {six|seven} minutes it is soft, after ten minutes it is hard.",),
    ),
    (
        ("how do I make pancakes", "how do you make pancakes"),
        (
            "mix flour, milk and eggs. fry a thin layer in a hot pan{ on both sides|}.",
            "stir eggs, milk and flour into a batter, and fry it in a little butter.",
        ),
    ),
    (
        ("how do I make soup", "how can I cook soup"),
        (
            "cut some vegetables, cook them in water with salt for half an hour, and taste it.",
            "boil {carrots|potatoes|onions} and other vegetables in water until they are soft. add salt and serve it hot.",
        ),
    ),
    (
        ("how do I plant a tree", "how do you plant a tree"),
        ("dig a hole, put the young tree in it, fill it with earth and give it plenty of water.",),
    ),
    (
        ("how do plants grow", "how does a plant grow"),
        (
            "a plant takes water from the ground and light from the sun, and makes its food from them.",
            "first a root comes out of the seed, then a stem and leaves that catch the light.",
        ),
    ),
    (
        ("how do birds fly", "how can birds fly"),
        ("birds beat their wings and push the air down. their bones are very light.",),
    ),
    (("how do fish breathe",), ("fish take oxygen out of the water with their gills.",)),
    (
        ("how do bees make honey",),
        ("bees collect nectar from flowers, carry it home and let it dry until it becomes honey.",),
    ),
    (
        ("how does a boat float", "why do boats float"),
        ("a boat pushes water aside, and the water pushes back and holds it up.",),
    ),
    (
        ("how can I sleep better", "how do I fall asleep"),
        (
            "go to bed at the same time every day, keep the room dark, and put the screen away.",
            "a short walk, a quiet room and a good book can help you {sleep|fall asleep}.",
        ),
    ),
    (
        ("how can I make friends", "how do I make new friends"),
        (
            "be friendly, ask people about themselves and listen. sharing a hobby helps.",
            "join a club, smile and say hello. friendship needs a little time.",
        ),
    ),
    (
        ("how can I learn a language", "how do I learn a new language"),
        ("practise a little every day, read simple stories and speak without fear of mistakes.",),
    ),
    (
        ("how can I learn to draw", "how do I get better at drawing"),
        ("look carefully, draw a little every day and do not throw your first pictures away.",),
    ),
    (
        ("how can I stay healthy", "how do I stay healthy"),
        (
            "eat vegetables, move every day, drink water and sleep enough.",
            "fresh food, walks and good sleep keep most people healthy.",
        ),
    ),
    (
        ("how do I say sorry", "how can I apologise"),
        ("say what you did, say that you are sorry, and ask how you can make it right.",),
    ),
    (("how can I save water",), ("turn off the tap while you brush your teeth, and take short showers.",)),
    (("how do I cross the road",), ("look left, look right, and look left again. go only when no car is coming.",)),
    (
        ("how do I wash my hands",),
        ("use water and soap, rub for twenty seconds, and dry your hands with a clean towel.",),
    ),
    (
        ("how can I calm down", "what can I do when I am angry"),
        ("breathe slowly, count to ten and drink some water. then talk about it.",),
    ),
    (
        ("how do you work", "how does a language model work", "how do language models work"),
        (
            "I read your words as tokens and guess the next token again and again until the answer is complete.",
            "a language model looks at the tokens so far and chooses a likely next one, step by step.",
        ),
    ),
    (
        ("how were you trained", "how were you made", "who trained you", "who made you"),
        (
            "I was trained on simple sentences made by a program, with the script of the rustvllm project.",
            "the rustvllm project trained me on an ordinary processor with text that it wrote itself.",
        ),
    ),
    (
        ("how does paged attention work", "how does paged attention save memory"),
        (
            "the KV cache is cut into blocks. each request has a block table, and blocks are given out only when they are needed.",
        ),
    ),
    (
        ("how does continuous batching work",),
        ("after every step finished requests leave the batch and waiting requests take their place.",),
    ),
    (
        ("how can I use you from Python", "how do I use rustvllm", "how do I start the server"),
        (
            "run rustvllm serve in a terminal and send requests to it, or use LLM in Python.",
            "type rustvllm serve, and the server answers on your own machine.",
        ),
    ),
    (
        ("how can I load a larger model", "how do I use a bigger model"),
        ("give its name to the server: rustvllm serve gpt2. larger models know much more than I do.",),
    ),
)

PURPOSES: tuple[Entry, ...] = (
    (
        ("what should I do when I am bored", "I am bored"),
        (
            "you could {read a book|go for a walk|draw a picture|call a friend|bake something}. {what do you like to do?|}",
            "how about #hobby? {or write a letter to a friend.|}",
        ),
    ),
    (
        ("what can I eat for breakfast", "what should I have for breakfast"),
        (
            "{bread with jam|porridge with berries|eggs and toast|fruit and yoghurt} is a good breakfast. {drink some #drink with it.|}",
        ),
    ),
    (
        ("what should I cook tonight", "what can I cook for dinner", "what should I eat"),
        (
            "how about #food? it is {simple|warm|easy to make|tasty}{ and good with bread|}.",
            "you could make #food with {rice|bread|a salad}.",
        ),
    ),
    (
        ("what should I read", "can you recommend a book"),
        ("a book of {short stories|fairy tales|poems|travel stories} is a good start. {which kind do you like?|}",),
    ),
    (
        ("where should I go on holiday", "where can I travel"),
        ("{the sea|the mountains|a quiet lake|an old town} would be nice. {take a map and good shoes.|}",),
    ),
    (
        (
            "what is a good name for a cat",
            "what is a good name for a dog",
            "how should I name my pet",
            "give me a name for a pet",
        ),
        ("#pet is a nice name. {#pet would be good too.|}", "you could call it #pet or #pet."),
    ),
    (
        ("what is a good gift for a friend", "what can I give my mother for her birthday"),
        (
            "{a book|flowers|a #colour #thing|a cake you baked yourself|a letter in your own words} would make a nice gift.",
        ),
    ),
    (
        ("give me some advice", "tell me something wise"),
        (
            "{take one step at a time|listen more than you speak|be kind, and be kind to yourself as well|rest when you are tired|do the hardest thing first|ask when you do not know}.",
        ),
    ),
    (
        ("tell me something interesting", "tell me a fun fact", "tell me a fact"),
        (
            "{an octopus has three hearts|honey keeps for many years|a snail can sleep for a very long time|the heart of a whale is as big as a small car|bees dance to show each other the way to flowers|bananas are berries, but strawberries are not|the Earth turns round once every day|butterflies taste with their feet}.",
            "did you know that {an owl can turn its head almost all the way round|penguins cannot fly|dolphins sleep with half of the brain at a time|a group of wolves is called a pack|some turtles live more than a hundred years}?",
        ),
    ),
    (
        ("cheer me up", "say something nice", "make me smile"),
        (
            "you are doing better than you think. {take a deep breath and smile.|}",
            "every cloud moves on, and the sun is still there. {I am glad that you are here.|}",
        ),
    ),
)
