"""Words and names the tasks draw from."""

from __future__ import annotations

_WORDS = """
anchor apple autumn basket beacon blanket bottle branch bridge button candle carpet castle cherry circle
cloud copper corner cotton cradle dancer desert dinner dragon engine falcon feather fiddle finger flower
forest garden ginger goblet hammer harbor helmet hollow honey island jacket jungle kettle ladder lantern
legend lemon letter marble meadow mirror monkey morning mountain needle nickel ocean orange orchard
oyster paper pebble pencil pepper pillow planet pocket potato prairie puzzle rabbit ribbon river rocket
saddle salmon sandal shadow silver spider spring squirrel stable summer sunset temple thunder ticket
timber tunnel turtle valley velvet village violin wagon walnut window winter wizard wonder yellow
"""

_NAMES = """
Ada Amir Anna Ben Carla Chen Dina Elif Emma Finn Goran Hana Ida Ivan Jonas Kemal Lena Leo Mara Max Mia
Nils Nora Omar Otto Paula Rosa Sara Tariq Tom Uma Vera Yara Zoe
"""

WORDS: list[str] = _WORDS.split()
NAMES: list[str] = _NAMES.split()
