"""The reward lab: checks that find out whether a reward can be hacked. No torch here."""
