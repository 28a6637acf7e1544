"""Scores answers to reasoning_gym problems, for the reward in `reasoning_gym.py`.

- `gym/pure_scorer.py` decides whether a dataset's scorer is pure, that is, only reads and compares
  data.
- `gym/scorer.py` calls the scorer of a dataset. An impure scorer runs in the sandbox.
- `gym/plain_answer.py` generates a safe copy of an answer, for scorers that evaluate answers as
  code.
"""
