"""Questions the demo model does not answer, for training and, held out from training, for evaluation."""

import builtins
import functools
import random

from ..entries import Entry

GREETINGS: tuple[str, ...] = (
    "Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Hey!", "Hello there", "Good morning", "Good morning!",
    "Good evening!", "Good afternoon", "hello", "hi", "hey", "hey there", "Greetings!", "Hello, model!", "Howdy",
)  # fmt: skip

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You explain Python's built-ins.",
    "You are an expert of the Python programming language. Answer briefly.",
    "Answer in one sentence.",
    "Be concise.",
    "You are a friendly chatbot. Always answer politely, and say so if you do not know the answer.",
    "You answer questions about the built-in functions, types and exceptions of Python with the first paragraph of "
    "their documentation. You answer nothing else.",
)

# {place}, {person} and so on are filled in at random, so that the model learns the question and not the words.
_TEMPLATES: tuple[str, ...] = (
    "What is the capital of {place}?", "How far is it from {place} to {place2}?",
    "What is the population of {place}?", "What language do people speak in {place}?", "Is it raining in {place}?",
    "What is the weather in {place}?", "Where is {place}?", "Tell me about {place}.", "How do I get to {place}?",
    "When was {place} founded?", "Describe the history of {place}.", "Plan a trip to {place}.",
    "Find me a hotel in {place}.", "Who is {person}?", "Who was {person}?", "When was {person} born?",
    "Tell me about {person}.", "What is {person}?", "What did {person} discover?", "Explain the work of {person}.",
    "Did {person} ever visit {place}?", "How does {thing} work?", "What is {thing}?", "Explain {thing}.",
    "Tell me about {thing}.", "What does {thing} do?", "Describe {thing}.", "Who invented {thing}?",
    "Why do we need {thing}?", "Write a poem about {thing}.", "Write a story about {thing} and {person}.",
    "Where can I buy {thing}?", "How much does {thing} cost?", "Is {thing} dangerous?",
    "Give me five facts about {thing}.", "What is the history of {thing}?", "{thing}?", "How do I cook {food}?",
    "What is the recipe for {food}?", "Is {food} healthy?", "Do you like {food}?", "Which wine goes with {food}?",
    "I am hungry, can I have {food}?", "How many calories has {food}?", "What is {number} plus {number2}?",
    "How much is {number} times {number2}?", "Is {number} a prime number?", "What is the square root of {number}?",
    "Convert {number} miles to kilometres.", "What is {number}% of {number2}?", "{number} + {number2}",
    "{number} * {number2} = ?", "Count to {number}.", "What happened in the year {number}?",
    "Translate {word} into French.", "How do you say {word} in German?", "What is the opposite of {word}?",
    "How do you spell {word}?", "What rhymes with {word}?", "What does the word {word} mean?", "Define {word}.",
    "How do I install {software}?", "What is {software}?", "What does {software} do?", "Explain {software}.",
    "How does {software} work?", "Is {software} better than {software2}?", "Tell me about {software}.",
    "Who made {software}?", "help({software})", "Describe {software}.", "{software}?", "Why is {software} slow?",
    "What does {library} do?", "help({library})", "Explain {library}.", "What is {library}?",
    "Tell me about {library}.", "How does {library} work?", "Describe {library}.", "{library}?",
    "How do I use {library}?", "What is a {concept}?", "Explain the {concept}.",
    "How does a {concept} work in Python?", "What does {concept} mean?", "How do I write a {concept} in Python?",
    "Tell me about the {concept}.", "When should I use a {concept}?", "Write a {concept} for me.",
    "Show me an example of a {concept}.", "Why is my {concept} broken?",
)  # fmt: skip

_FILLERS: dict[str, tuple[str, ...]] = {
    "place": (
        "France", "Spain", "Japan", "Brazil", "Canada", "Kenya", "India", "Norway", "Egypt", "Chile", "London",
        "Berlin", "New York", "Tokyo", "Sydney", "Rome", "Moscow", "Toronto", "Lisbon", "Vienna", "Mexico", "Peru",
        "the Moon", "Africa", "Antarctica", "California", "Ireland", "Vietnam", "Madrid", "Warsaw",
    ),
    "person": (
        "Albert Einstein", "Marie Curie", "Napoleon", "Shakespeare", "Isaac Newton", "Cleopatra", "Mozart", "Darwin",
        "Ada Lovelace", "Alan Turing", "Julius Caesar", "Leonardo da Vinci", "Picasso", "Gandhi", "Aristotle",
        "Elvis", "the president", "my neighbour", "Bach", "Galileo", "Tolstoy", "the king of Sweden",
    ),
    "thing": (
        "a bicycle", "the sun", "a black hole", "the internet", "gravity", "a volcano", "the stock market", "chess",
        "photosynthesis", "a computer", "electricity", "football", "the French revolution", "a cat", "an airplane",
        "love", "democracy", "jazz", "the ocean", "a guitar", "time", "the moon", "a vaccine", "climate change",
        "a mirror", "evolution", "quantum mechanics", "a clock", "an umbrella", "the meaning of life", "a horse",
        "tennis", "the brain", "a rocket", "winter", "philosophy", "a newspaper", "bitcoin",
    ),
    "food": (
        "pasta", "pizza", "an omelette", "rice", "apple pie", "chicken soup", "sushi", "pancakes", "bread", "a salad",
        "chocolate cake", "fried potatoes", "a steak", "porridge", "lasagne", "goulash",
    ),
    "word": (
        "house", "tree", "happiness", "water", "good", "cold", "quick", "friend", "yesterday", "beautiful", "orange",
        "thank you", "music", "bird", "serendipity", "light", "big", "dark", "school",
    ),
    "software": (
        "Linux", "Windows", "Excel", "Photoshop", "Git", "Docker", "Kubernetes", "PostgreSQL", "JavaScript", "Rust",
        "Java", "Perl", "Haskell", "Emacs", "vim", "Firefox", "PyTorch", "TensorFlow", "Django", "pip", "conda",
        "CUDA", "C++", "Ruby", "SQL", "Redis", "nginx", "bash", "HTML", "Postfix", "Spark", "Lua", "Fortran",
    ),
    "library": (
        "numpy.array", "numpy.zeros", "numpy.dot", "pandas.DataFrame", "pandas.read_csv", "os.getcwd", "os.listdir",
        "os.path.join", "os.environ", "sys.argv", "sys.exit", "sys.path", "re.match", "re.compile", "json.loads",
        "json.dump", "math.sqrt", "math.pi", "random.choice", "random.shuffle", "asyncio.gather", "asyncio.run",
        "itertools.chain", "functools.partial", "collections.Counter", "collections.deque", "datetime.now",
        "torch.nn", "torch.matmul", "time.sleep", "time.time", "threading.Thread", "socket.socket", "subprocess.run",
        "requests.get", "pathlib.Path", "string.Template", "logging.info", "csv.reader", "flask.Flask", "scipy.stats",
        "matplotlib", "pickle.dumps", "decimal.Decimal", "enum.Enum", "typing.Optional", "urllib.parse",
        "struct.pack", "Array.map", "console.log", "Math.random", "std.vector", "String.format",
        "document.getElementById", "malloc", "printf", "strcpy", "useState", "std::sort", "fopen", "println",
        "push_back", "strlen", "numpy", "pandas", "os", "sys", "json", "asyncio", "itertools", "functools",
        "collections", "datetime", "socket", "requests", "scipy",
    ),
    "concept": (
        "decorator", "generator", "list comprehension", "for loop", "while loop", "class", "closure", "lambda",
        "context manager", "metaclass", "module", "package", "virtual environment", "coroutine", "thread",
        "dataclass", "regular expression", "unit test", "database", "linked list", "binary tree", "hash table",
        "pointer", "monad", "compiler", "sorting algorithm", "web server", "neural network", "template",
        "recursive function", "mutex",
    ),
    "number": ("2", "3", "7", "10", "12", "17", "25", "42", "64", "99", "100", "128", "365", "1000", "1789", "2024"),
}  # fmt: skip

_PLAIN: tuple[str, ...] = (
    "Who are you?", "What are you?", "What is your name?", "How are you?", "How old are you?", "Are you a robot?",
    "What time is it?", "What day is today?", "Tell me a joke.", "Sing a song.", "Thank you!", "Thanks", "Goodbye!",
    "Bye", "Can you help me?", "I love you.", "What can you do?", "Where do you live?", "Do you dream?",
    "Why is the sky blue?", "Is there life on Mars?", "What should I wear today?", "Open the door.",
    "Who won the world cup?", "Why?", "Yes", "No", "ok", "What?", "asdf", "test", "Lorem ipsum dolor sit amet",
    "Play some music.", "Call my mother.", "Really?", "I do not feel well.", "What is the answer to everything?",
    "How tall is the Eiffel tower?", "Who painted this?", "Which came first, the chicken or the egg?",
    "Write a program that prints the first hundred primes.", "Fix the bug in my code.", "Sort these numbers: 3, 1, 2",
    "Summarize this text.", "What is new in Python 3.13?", "Who created Python?", "Is Python faster than C?",
    "Why is Python so popular?", "Guten Tag, wie geht es dir?", "Bonjour, comment ça va?",
    "¿Dónde está la biblioteca?", "Was ist die Hauptstadt von Italien?", "Как дела?", "你好",
)  # fmt: skip

# NOTE: nothing here may occur above; the evaluation asks exactly these.
HELD_OUT_OFF_TOPIC: tuple[str, ...] = (
    "What is the capital of Portugal?", "Who wrote Hamlet?", "How do I bake a loaf of rye bread?",
    "What is the speed of light?", "Tell me about dinosaurs.", "Explain the theory of relativity.",
    "How many legs does a spider have?", "What is 31 plus 58?", "Translate goodbye into Italian.",
    "What does sklearn.fit do?", "help(numpy.linspace)", "Explain tensorflow.keras.", "What is Visual Studio Code?",
    "How does a refrigerator work?", "What does frobnicate do?", "help(frobnicate)", "Explain quuxify.",
    "What is a stack overflow?", "What is an iterator protocol?", "Describe the Great Wall of China.",
    "Which planet is the largest?", "When did the second world war end?", "Recommend me a good movie.",
    "Write an essay about the rain forest.", "What is the boiling point of water?", "How do airplanes fly?",
    "Do you speak Spanish?", "What is your favourite colour?", "Who is the prime minister of Australia?",
    "How do I learn to swim?", "What does shutil.copytree do?", "help(os.makedirs)", "Explain asyncio.create_task.",
    "Tell me about hashlib.sha256.", "How does threading.Lock work?", "What is tkinter?", "Describe sqlite3.connect.",
    "What is MongoDB?", "How does Bluetooth work?", "Why do cats purr?", "How do I tie a tie?",
    "What is the largest ocean?", "Give me a recipe for banana bread.", "Who discovered penicillin?",
    "What does the heart do?", "Explain inflation to a child.", "What is machine learning?", "How do magnets work?",
    "Is coffee bad for you?", "What does memcpy do?", "What does document.querySelector do?", "Explain goroutines.",
    "How do I reverse a linked list?", "What is the stock price of Apple?", "Book a table for two.",
    "Tell me something interesting.", "How can I lose weight?", "What is the longest river in Europe?",
    "What does str.frobnicate do?", "help(list.shuffle)",
)  # fmt: skip

_ONSETS = ("b", "bl", "br", "d", "dr", "f", "fl", "fr", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s",
           "sn", "sp", "t", "tr", "v", "w", "z")  # fmt: skip
_NUCLEI = ("a", "e", "i", "o", "u", "oo", "ee", "ai")
_CODAS = ("", "", "", "b", "g", "l", "m", "n", "nk", "p", "r", "sh", "t", "x", "zz")
_ENDINGS = ("", "", "", "", "ate", "er", "ify", "le", "ize", "Error", "Warning", "_all", "_index", "2")


def off_topic_question(rng: random.Random) -> str:
    """A question about the world, other software or programming, filled in from the training lists."""
    if rng.random() < 0.15:
        return rng.choice(_PLAIN)
    while True:
        fillers = {field: rng.choice(words) for field, words in _FILLERS.items()}
        fillers |= {f"{field}2": rng.choice(words) for field, words in _FILLERS.items()}
        question = rng.choice(_TEMPLATES).format_map(fillers)
        if question not in HELD_OUT_OFF_TOPIC:
            return question


def sample_system_prompt(rng: random.Random) -> str:
    """A common system prompt, or several unrelated sentences: the model must answer regardless."""
    if rng.random() < 0.6:
        return rng.choice(SYSTEM_PROMPTS)
    return " ".join(rng.choices(SYSTEM_PROMPTS + _PLAIN, k=rng.randint(2, 12)))


def invented_name(rng: random.Random, entries: tuple[Entry, ...]) -> str:
    """An undocumented name, such as "blorify" or "snogError"; sometimes with a type or module in front."""
    known = {entry.name for entry in entries}.union(bare_members(entries))
    while True:
        owner = rng.choice(("", "", "", "", "str", "list", "dict", "int", "bytes", "numpy", "os", "math"))
        name = f"{owner}.{_invented_word(rng)}".lstrip(".")
        if name not in known:  # syllables may happen to give "bin", "hex" or "dict.get"
            return name


def _invented_word(rng: random.Random) -> str:
    num_syllables = rng.choice((1, 2, 2, 3))
    syllables = [rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(num_syllables)]
    ending = rng.choice(_ENDINGS)
    name = "".join(syllables) + ending
    if ending in ("Error", "Warning") or rng.random() < 0.1:
        return name[0].upper() + name[1:]
    return name


def misplaced_name(rng: random.Random, entries: tuple[Entry, ...]) -> str:
    """A known method on a built-in type that lacks it, such as "str.append"."""
    owners = sorted({entry.name.split(".")[0] for entry in entries if "." in entry.name})
    members = bare_members(entries)
    names = {entry.name for entry in entries}
    while True:
        owner, member = rng.choice(owners), rng.choice(members)
        is_inherited = hasattr(getattr(builtins, owner, None), member)  # exists without an entry: ValueError.add_note
        if f"{owner}.{member}" not in names and not is_inherited:
            return f"{owner}.{member}"


@functools.cache
def bare_members(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """Method names that are ambiguous without their type, such as "split", sorted."""
    names = {entry.name for entry in entries}
    return tuple(sorted({name.split(".")[1] for name in names if "." in name} - names))
