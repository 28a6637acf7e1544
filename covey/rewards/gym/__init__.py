"""Scores answers to reasoning_gym problems, for the reward in `reasoning_gym.py`.

gym/pure_scorer.py     decides whether a dataset's scorer only reads and compares
gym/scorer.py          calls the scorer of a dataset; if it is not pure, in the sandbox
gym/plain_answer.py    writes a safe copy of an answer for scorers that evaluate answers as code
"""
