"""What an experiment's run folders show: tables, figures, a page, and whether the claims hold."""
