"""The report of one run, as an offline HTML page and as Markdown."""
