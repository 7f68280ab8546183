"""A plan as one page."""
def as_page(report): return ""
