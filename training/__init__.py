"""How the bundled model was made: its text, its training rows, its network, and `python -m training.train`.

Run it from the root of a checkout, with skimkv installed. None of it is in the package.
"""
