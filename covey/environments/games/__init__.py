"""Games with a hidden state: guess a number, a maze, and sokoban with a limited view.

A game is a plain class, whose constructor takes a random number generator and a size. The public
methods of a game are the tools of the policy. To add a game, write its class and add the class to
GAMES (environment.py).
"""

from covey.environments.games.environment import GAMES, Games

__all__ = ["GAMES", "Games"]
