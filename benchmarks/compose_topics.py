"""Compose the prompts of benchmarks/configs/gpu.toml: 40 templates, each with 200 topics.

    python -m benchmarks.compose_topics --count 6000 build/topics.jsonl

Figures of November 2026 are of these; examples/compose_prompts.py composes more varied ones.
"""

import argparse
import json
from pathlib import Path

from runtime.data.draws import permutation

TEMPLATES = (
    "Explain {} to a curious ten-year-old.",
    "What are three interesting facts about {}?",
    "Write a short paragraph about {}.",
    "Why does {} matter in daily life?",
    "Give me a brief history of {}.",
    "What is a common misunderstanding about {}?",
    "Write a four-line poem about {}.",
    "List five words that come to mind with {}, and say why.",
    "Write a short story that begins with {}.",
    "What would a beginner need to know about {}?",
    "Summarise the most important ideas about {} in two sentences.",
    "How would you describe {} to someone who has never heard of it?",
    "What questions would you ask an expert on {}?",
    "Compare {} with something similar.",
    "What are the advantages and disadvantages of {}?",
    "Write a dialogue between two friends about {}.",
    "Give step-by-step advice on learning about {}.",
    "What tools or materials are connected with {}?",
    "How has {} changed over the last hundred years?",
    "Write an email that invites a colleague to a talk on {}.",
    "Describe a museum exhibit about {}.",
    "What could go wrong with {}, and how can it be avoided?",
    "Write a product description connected with {}.",
    "Tell me something surprising about {}.",
    "Make a quiz of three questions with answers about {}.",
    "How do people in different countries think about {}?",
    "Write the opening of a speech on {}.",
    "Which jobs have to do with {}?",
    "What does the future of {} look like?",
    "Write a diary entry of somebody who spends a day with {}.",
    "Turn the subject of {} into a riddle.",
    "Give a definition of {} and one example.",
    "What should a teacher say about {} in five minutes?",
    "Write a news headline and a first sentence about {}.",
    "How can {} be done or enjoyed with little money?",
    "What is the science behind {}?",
    "Write a letter to the editor about {}.",
    "List the steps of a small project about {}.",
    "What do children usually ask about {}?",
    "Recommend a way to remember the main points about {}.",
)
TOPICS = (
    "rain and clouds", "the moon", "bicycles", "baking bread", "honey bees", "volcanoes",
    "chess", "the human heart", "libraries", "coffee", "earthquakes", "penguins", "photography",
    "ancient Rome", "solar panels", "swimming", "gardening", "dinosaurs", "the violin", "maps",
    "magnets", "electric cars", "sleep", "the Amazon river", "football", "clocks", "glass",
    "chocolate", "spiders", "the stock market", "robots", "rainforests", "glaciers", "tea",
    "the Olympic Games", "submarines", "vaccines", "bridges", "whales", "paper", "lightning",
    "the Great Wall of China", "origami", "saving money", "rivers", "hot air balloons", "cats",
    "dogs", "elephants", "the ocean floor", "trains", "sailing", "mushrooms", "the desert",
    "black holes", "telescopes", "the printing press", "radio", "the internet", "computer games",
    "passwords", "recycling", "plastic", "wind turbines", "cheese", "salt", "sugar", "pasta",
    "rice farming", "apples", "tomatoes", "the immune system", "bones", "the brain", "memory",
    "dreams", "running", "yoga", "mountain climbing", "skiing", "ballet", "jazz", "the piano",
    "opera", "cinema", "theatre", "painting", "sculpture", "poetry", "novels", "newspapers",
    "elections", "the law", "taxes", "small businesses", "job interviews", "meetings",
    "teamwork", "friendship", "honesty", "courage", "patience", "happiness", "stress",
    "time management", "study habits", "public speaking", "learning a language", "grammar",
    "handwriting", "mathematics", "fractions", "geometry", "probability", "statistics",
    "prime numbers", "algorithms", "databases", "Python programming", "web pages",
    "artificial intelligence", "space travel", "Mars", "satellites", "comets", "gravity",
    "light and colour", "sound waves", "atoms", "water", "fire", "steel", "gold", "diamonds",
    "oil", "coal", "batteries", "bridges made of wood", "houses", "cities", "traffic",
    "airports", "hospitals", "schools", "universities", "markets", "restaurants", "hotels",
    "camping", "fishing", "hiking", "birdwatching", "butterflies", "ants", "sharks", "turtles",
    "frogs", "horses", "cows", "sheep", "wool", "cotton", "silk", "fashion", "shoes", "soap",
    "perfume", "candles", "pottery", "furniture", "tools", "locks and keys", "umbrellas",
    "calendars", "the seasons", "snow", "storms", "deserts at night", "islands", "beaches",
    "caves", "forests", "national parks", "farms", "kitchens", "breakfast", "picnics",
    "birthday parties", "weddings", "holidays", "travel by train", "postcards", "stamps",
    "coins", "the euro", "banks", "insurance", "charity", "volunteering", "neighbours",
    "grandparents", "twins", "names", "flags", "anthems", "kings and queens", "pirates",
    "explorers", "the Silk Road", "the Middle Ages", "the Renaissance", "the Industrial Revolution",
    "the first computers", "the telephone", "the camera", "the microscope", "penicillin",
)  # fmt: skip


def compose(count: int) -> list[str]:
    """Draw ``count`` different pairs of template and topic.

    Args:
        count: At most ``len(TEMPLATES) * len(TOPICS)``.
    """
    order = permutation(len(TEMPLATES) * len(TOPICS), key=(1, 100), counter=(0, 0, 0))
    if count > len(order):
        raise SystemExit(f"--count must be at most {len(order)}, found {count}")
    pairs = (divmod(int(index), len(TOPICS)) for index in order[:count])
    return [TEMPLATES[template].format(TOPICS[topic]) for template, topic in pairs]


def main() -> None:
    """Write the prompts as JSONL."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=6000)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt}) for prompt in compose(options.count)]
    options.file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {options.file}")


if __name__ == "__main__":
    main()
