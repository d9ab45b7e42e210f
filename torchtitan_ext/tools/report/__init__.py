"""``amo report``: what runs did, as one HTML file of figures and tables."""
