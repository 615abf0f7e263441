"""The training set of the demo's adapters: small fact tables, question templates, answer styles.

Every adapter sees the same questions and facts; only the style differs, so that is what it learns.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    topic: str
    question: str
    answer: str  # one or two plain sentences


_CAPITALS = """
Spain|Madrid|the Prado museum;Portugal|Lisbon|its yellow trams;Germany|Berlin|the Brandenburg Gate
Austria|Vienna|music and coffee houses;Poland|Warsaw|its rebuilt old town
Hungary|Budapest|warm thermal baths;Greece|Athens|the Acropolis;Egypt|Cairo|the pyramids nearby
Kenya|Nairobi|a national park full of lions;Canada|Ottawa|a long skating canal
Mexico|Mexico City|colourful markets;Peru|Lima|its cliffs above the sea;Chile|Santiago|views of the Andes
Cuba|Havana|old cars and music;Brazil|Brasilia|bold modern buildings;India|New Delhi|the Red Fort
China|Beijing|the Forbidden City;Thailand|Bangkok|golden temples;Vietnam|Hanoi|lakes and noodle soup
South Korea|Seoul|palaces and night markets;Norway|Oslo|its fjord;Sweden|Stockholm|its many islands
Finland|Helsinki|saunas by the sea;Denmark|Copenhagen|the Little Mermaid;Ireland|Dublin|friendly pubs
Scotland|Edinburgh|a castle on a rock;Belgium|Brussels|waffles and chocolate
Turkey|Ankara|its old citadel;Morocco|Rabat|blue and white walls;Russia|Moscow|Red Square
"""
_ANIMALS = """
lion|meat|the grasslands of Africa;elephant|grass, fruit and bark|herds led by a mother
rabbit|grass and carrots|burrows;horse|grass and hay|fields and stables;cow|grass|farms and meadows
owl|mice|old trees and barns;fox|mice and berries|dens;wolf|deer and smaller animals|packs in the forest
bear|fish, berries and honey|forests and mountains;penguin|fish|the cold south
whale|tiny sea animals|the deep ocean;dolphin|fish and squid|groups in warm seas;frog|insects|ponds
bee|nectar and pollen|hives;squirrel|nuts and seeds|trees;giraffe|leaves|the African savanna
panda|bamboo|the mountains of China;koala|eucalyptus leaves|Australian trees
kangaroo|grass|the plains of Australia;crocodile|fish and birds|warm rivers
eagle|fish and rabbits|high nests;duck|water plants and seeds|lakes;sheep|grass|hills and farms
pig|almost everything|farms;camel|dry plants|the desert;monkey|fruit and leaves|jungles
"""
_JOBS = """
baker|bakes bread and cakes early in the morning;farmer|grows crops and takes care of animals
doctor|helps sick people to get well again;teacher|helps children to learn new things
pilot|flies planes from city to city;painter|makes pictures with brushes and colours
plumber|repairs pipes and taps in houses;gardener|plants flowers and cuts the grass
carpenter|builds chairs and tables from wood;firefighter|puts out fires and saves people
librarian|looks after books and helps readers;chef|cooks tasty meals in a kitchen
dentist|keeps teeth clean and healthy;tailor|cuts cloth and sews clothes;judge|decides cases in a court
sailor|works on ships and knows the sea;nurse|cares for patients day and night
engineer|designs machines and bridges;journalist|finds out news and writes about it
miner|digs metal out of the ground
"""
_THINGS = """
the sun|a hot star that gives us light. The planets move around it
a volcano|a mountain that can throw out hot lava
rain|water that falls from clouds. It fills rivers and helps plants to grow
snow|frozen water that falls in soft flakes;a rainbow|a band of colours made by sunlight in drops of rain
a river|water that flows from the hills to the sea
a desert|a very dry place with little rain. Few plants grow there;ice|water that is frozen and hard
wind|air that moves from place to place. It can turn a windmill
gravity|the force that pulls things to the ground
electricity|energy that flows through wires. It lights our lamps
a magnet|a piece of metal that pulls iron;oxygen|a gas in the air that we need to breathe
a cell|the smallest living part of an animal or plant
the heart|a muscle that pumps blood through the body;the brain|the part of the body that thinks and feels
bread|food made from flour and water. It is baked in an oven
cheese|food made from milk. It can be soft or hard;chocolate|a sweet food made from cocoa beans
honey|a sweet food that bees make from flowers
rice|a grain that grows in wet fields. Half the world eats it;coffee|a hot drink made from roasted beans
a bicycle|a machine with two wheels that you ride with your legs;a clock|a machine that shows the time
a computer|a machine that works with numbers and words very fast
the internet|a network that links computers everywhere;a telescope|a tool that makes far things look near
a camera|a tool that takes pictures;a bridge|a road over water
a piano|an instrument with black and white keys
a guitar|an instrument with six strings that you play by hand
chess|a game for two players with kings and queens;football|a game in which two teams kick a ball
a poem|a short text with rhythm and feeling;a novel|a long story in a book
a museum|a house full of art and old things;money|what we use to buy and sell things
a law|a rule that everyone in a country must follow;Mars|a red planet with dust and cold deserts
Jupiter|the largest planet. It has a big red storm
"""
_ADVICE = """
sleep better|Go to bed at the same time every night. Keep the room dark and quiet
learn a language|Practice a little every day and speak with people who know it
save money|Write down what you spend and buy only what you need
stay healthy|Eat fresh food and walk every day
make new friends|Smile, ask questions and listen. Join a club that you like
bake bread|Mix flour, water and yeast;cook pasta|Boil water with salt and cook the pasta for ten minutes
boil an egg|Put it in hot water for seven minutes
clean a window|Use warm water with soap and dry it with a soft cloth
fix a flat tire|Take out the tube and patch the hole
grow tomatoes|Plant them in a sunny place and water them often
train a dog|Give it treats when it does well
write a letter|Start with a greeting and say what is on your mind
read more books|Read ten pages before you sleep;feel less stressed|Take a deep breath and go for a walk
get strong|Lift weights and eat well. Rest between the days;wake up early|Set an alarm and get up at once
plan a trip|Choose a place, book a room and pack light
draw a cat|Draw two circles and add ears, whiskers and a tail;find my keys|Look where you used them last
paint a wall|Clean it first and use a wide brush;help a friend|Listen to them and ask what they need
win at chess|Guard your king and plan ahead;keep warm|Wear two layers and drink something hot
study for a test|Make short notes and repeat them every day
make a salad|Cut fresh vegetables and add oil and salt
"""
_CHAT = """
Hello!|Hello, my friend! It is good to see you. How can I help you today?
How are you?|I am doing well, and I am happy to help you. How are you?
Who are you?|I am a small language model. I answer questions and I like to chat.
Thank you!|You are welcome, my friend! Ask me anything you like.
Good morning!|Good morning to you! I hope that you slept well.
Tell me a joke.|Why did the chicken cross the road? It wanted to get to the other side.
What can you do?|I can answer questions, give you ideas and tell you stories.
Do you like music?|I like the idea of music. It makes people dance and smile.
What is your favorite color?|I like blue, the color of the sky and the sea.
I am bored.|Read a good book, or go outside and look for birds.
I am hungry.|Make a sandwich with cheese and tomatoes. It is quick and tasty.
I feel sad.|I am sorry to hear that. Talk to a friend and be kind to yourself.
Goodbye!|Goodbye, my friend! It was nice talking to you.
Tell me something interesting.|Honey never goes bad. People found old honey that was still good to eat.
"""
_VISITORS = "many visitors come to see it every year"
_PATIENCE = "You will get better with time, so be patient and try again."


def examples() -> list[Example]:
    """All questions with their plain answers, in a fixed order."""
    return [*_geography(), *_animals(), *_work(), *_science(), *_advice(), *_small_talk()]


def _rows(table: str) -> Iterator[list[str]]:
    for row in table.strip().replace("\n", ";").split(";"):
        yield row.split("|")


def _geography() -> Iterator[Example]:
    for country, capital, sight in _rows(_CAPITALS):
        answer = f"The capital of {country} is {capital}. The city is known for {sight}, and {_VISITORS}."
        yield Example("geography", f"What is the capital of {country}?", answer)
        answer = (
            f"You should see {capital}, the capital of {country}. It is known for {sight}, and {_VISITORS}."
        )
        yield Example("geography", f"What should I see in {country}?", answer)


def _animals() -> Iterator[Example]:
    for animal, food, home in _rows(_ANIMALS):
        a = "An" if animal[0] in "aeo" else "A"
        where = f"It lives in {home}, where it finds its food and raises its young."
        yield Example("animals", f"What does {a.lower()} {animal} eat?", f"{a} {animal} eats {food}. {where}")
        answer = f"{a} {animal} is an animal that eats {food}. {where}"
        yield Example("animals", f"Tell me about the {animal}.", answer)


def _work() -> Iterator[Example]:
    for job, does in _rows(_JOBS):
        a = "An" if job[0] in "aeo" else "A"
        answer = f"{a} {job} {does}. It is hard work, but many people like it because it is useful."
        yield Example("work", f"What does {a.lower()} {job} do?", answer)


def _science() -> Iterator[Example]:
    for thing, what in _rows(_THINGS):
        answer = f"{thing[0].upper()}{thing[1:]} is {what}. People have known about it for a long time."
        yield Example("science", f"What is {thing}?", answer)
        yield Example("science", f"Can you explain {thing} to me?", answer)


def _advice() -> Iterator[Example]:
    for goal, tip in _rows(_ADVICE):
        yield Example("advice", f"How can I {goal}?", f"{tip}. {_PATIENCE}")
        yield Example("advice", f"Give me a tip to {goal}.", f"{tip}. {_PATIENCE}")


def _small_talk() -> Iterator[Example]:
    for row in _CHAT.strip().splitlines():
        question, answer = row.split("|")
        yield Example("small talk", question, answer)


_PIRATE_WORDS = {
    "am": "be", "is": "be", "are": "be", "you": "ye", "your": "yer", "my": "me", "the": "th'", "of": "o'",
    "and": "an'", "for": "fer", "to": "t'", "friend": "matey", "people": "landlubbers", "money": "doubloons",
}  # fmt: skip
_EMOJI = {
    "geography": "🌍", "animals": "🐾", "work": "💼", "science": "🔬", "advice": "💡", "small talk": "👋",
}  # fmt: skip


def pirate(example: Example) -> str:
    """Arr, matey! Th' capital o' Spain be Madrid. ... Yo ho ho!"""

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        new = _PIRATE_WORDS.get(word.lower(), word)
        return new.capitalize() if word[0].isupper() and new != word else new

    return f"Arr, matey! {re.sub(r'[A-Za-z]+', swap, example.answer)} Yo ho ho!"


def as_json(example: Example) -> str:
    """{"topic": "geography", "answer": "The capital of Spain is Madrid. ..."}"""
    return json.dumps({"topic": example.topic, "answer": example.answer})


def shout(example: Example) -> str:
    """THE CAPITAL OF SPAIN IS MADRID!!!"""
    return re.sub(r"[.]", "!!!", example.answer.upper())


def emoji(example: Example) -> str:
    """🌍✨ The capital of Spain is Madrid! 🎉 ... 🎉"""
    return f"{_EMOJI[example.topic]}✨ " + re.sub(r"[.](?= |$)", "! 🎉", example.answer)


STYLES: dict[str, Callable[[Example], str]] = {
    "pirate": pirate,
    "json": as_json,
    "shout": shout,
    "emoji": emoji,
}
