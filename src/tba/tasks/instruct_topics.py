"""What the task `instruct` asks about: topics, and open questions that suit any of them."""

from __future__ import annotations

QUESTIONS = (
    "What is the best thing about {topic}?",
    "Why do people like {topic}?",
    "Give me a tip about {topic}.",
    "Tell me something interesting about {topic}.",
    "Describe {topic} to a child.",
    "What should a beginner know about {topic}?",
    "Write a short note about {topic}.",
    "What makes {topic} important?",
    "How would you explain {topic} to a friend?",
    "What comes to your mind when you think of {topic}?",
)

_TOPICS = """
tea, coffee, bread, cheese, honey, apples, tomatoes, chocolate, soup, rice, salt, pepper, lemons, potatoes, pancakes,
mushrooms, ice cream, noodles, olive oil, garlic, dogs, cats, horses, elephants, dolphins, owls, bees, ants, spiders,
whales, penguins, wolves, turtles, butterflies, bats, frogs, sharks, crows, foxes, camels, trees, roses, moss, cactuses,
bamboo, seeds, forests, deserts, rivers, lakes, mountains, volcanoes, islands, caves, glaciers, beaches, waterfalls,
swamps, the ocean, the moon, the sun, stars, comets, planets, rain, snow, thunder, wind, fog, rainbows, clouds,
sunsets, spring, summer, autumn, winter, bicycles, trains, airplanes, boats, buses, bridges, tunnels, lighthouses,
windmills, castles, museums, libraries, theaters, markets, hospitals, schools, kitchens, gardens, balconies, stairs,
doors, windows, mirrors, clocks, candles, lamps, chairs, umbrellas, shoes, hats, gloves, pockets, buttons, blankets,
pillows, pencils, paper, ink, books, maps, letters, stamps, newspapers, poems, novels, fairy tales, jokes, riddles,
puzzles, chess, card games, board games, kites, dolls, drums, pianos, guitars, violins, choirs, dancing, painting,
photography, pottery, knitting, sewing, cooking, baking, fishing, hiking, swimming, running, skiing, climbing, sailing,
camping, gardening, cycling, yoga, football, tennis, basketball, archery, sleep, dreams, memory, laughter, music,
silence, patience, courage, kindness, honesty, friendship, curiosity, trust, teamwork, birthdays, holidays, weddings,
picnics, breakfast, homework, neighbors, grandparents, babies, teachers, nurses, farmers, firefighters, bakers, tailors,
robots, computers, telephones, radios, cameras, satellites, rockets, microscopes, magnets, batteries, electricity,
glass, steel, wood, gold, plastic, soap, sugar, cotton, wool, leather, recycling, compost, water, fire, shadows, echoes,
numbers, circles, triangles, money, voting, traffic lights, elevators, zoos, circuses, parks, playgrounds, fireworks
"""
TOPICS = tuple(topic.strip() for topic in _TOPICS.split(","))
