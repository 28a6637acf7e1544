"""The web page of runs: `covey ui`. No torch here, so it opens at once on any machine."""
