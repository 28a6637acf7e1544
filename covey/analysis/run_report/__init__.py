"""The report of one run: an offline HTML page and Markdown."""
