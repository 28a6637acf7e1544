"""Games with a hidden state: guess a number, a maze, and sokoban with a limited view.

A game is a plain class, made from random numbers and a size. Its public methods are the tools. To
add a game, write its class and name it in GAMES (environment.py).
"""

from covey.environments.games.environment import GAMES, Games

__all__ = ["GAMES", "Games"]
