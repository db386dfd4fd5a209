"""Numbers as text, tables, and charts as data: what reports, terminals, notebooks and plots have in common."""
