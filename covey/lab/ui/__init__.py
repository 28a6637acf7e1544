"""The web page that shows runs (`covey ui`).

The web server does not import torch, so it starts quickly on any machine.
"""
