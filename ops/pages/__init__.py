"""Reports as HTML pages that stand alone, and the charts on them."""
