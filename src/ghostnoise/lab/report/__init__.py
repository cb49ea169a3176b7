"""Reports of an experiment's run folders: statistics, tables, figures, an HTML page, and a server for it."""
